"""Who uses which message tags on a communicator, so that nobody takes another's message.

Far below the 32767 that every MPI grants.
"""

SIGNATURE = 1  # what each rank of a ring says about its next call
RING = range(2, 2 + 16384)  # one a call, round and round: far more than calls under way
ONE_SHOT = range(RING.stop, RING.stop + 1024)  # one a call, as its signature has it
DOUBLING = range(ONE_SHOT.stop, ONE_SHOT.stop + 1024)  # in sixteens, one a call, that its signature chooses
CLOCK = DOUBLING.stop
SERVICE = range(CLOCK + 1, CLOCK + 1 + 1024)  # between workers and servers
CHANNELS = range(SERVICE.stop, 32768)
