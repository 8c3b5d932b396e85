"""Flags of the OSU-style benchmarks: names and defaults are those of the OSU Micro-Benchmarks."""

import figures
import osu_memory

ELEMENT = 4  # bytes of the float32 that are added up
OF_DEVICES = ("mpi", "ring", "host")  # algorithms that take memory of a device


def parse(test, argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = _parser(test, rank)
    flags = parser.parse_args(argv)
    for name in ("validation", "message_size", "window_size", "plot", "buffer", "memory", "on_device"):
        if not hasattr(flags, name):
            setattr(flags, name, None)
    _check_ranks(test, num_ranks)
    flags.sizes = _sizes(test, flags) if test.sizes else [0]
    for name, low in (("iterations", 1), ("warmup", 0), ("window_size", 1)):
        value = getattr(flags, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a whole number >= {low}")
    if test.sizes:
        _check_memory(test, flags)
    return flags


def _parser(test, rank: int) -> figures.Flags:
    parser = figures.Flags(f"{test.name}.py", test.title, rank)
    add = parser.add_argument
    if test.sizes:
        add("-m", "--message-size", metavar="[MIN:]MAX", help="bytes; default: {}:{}".format(*test.sizes))
    add("-i", "--iterations", type=int, metavar="N", help="default: {}, {} from 8 KiB on".format(*test.iterations))
    add("-x", "--warmup", type=int, metavar="N", help="iterations before; default: {}, {}".format(*test.warmup))
    if test.window:
        add("-W", "--window-size", type=int, default=test.window, metavar="N", help=f"default: {test.window} messages")
    if test.check:
        add("-c", "--validation", action="store_true", help="count wrong elements; exit code 1 where there are any")
    add("-f", "--full", action="store_true", help="least and most of all ranks, iterations, p50 and p99")
    add("--algorithm", choices=test.algorithms, default=test.algorithms[0], help=f"default: {test.algorithms[0]}")
    add("--pin", action="store_true", help="rank r keeps to core r; default: as the launcher has it")
    add("--json", metavar="FILE", help="write all figures there")
    if test.sizes:  # a barrier has neither buffers nor a curve
        add("--plot", metavar="FILE", help="draw the first column over the size; needs matplotlib")
        add("-d", "--accelerator", choices=["cuda"], help="buffers on the device, as --buffer cupy")
        add("--buffer", choices=osu_memory.KINDS, help="the library that owns them; default: numpy")
        add("memory", nargs="*", metavar="D|H", help="rank 0's buffer and the others': on the device or the host")
    return parser


def _check_ranks(test, num_ranks: int) -> None:
    fits, wanted = {
        "two": (num_ranks == 2, "two ranks"),
        "pairs": (num_ranks > 1 and num_ranks % 2 == 0, "an even number of ranks"),
        "any": (num_ranks > 1, "two ranks or more"),
    }[test.ranks]
    if not fits:
        raise ValueError(f"{num_ranks} rank{'s' * (num_ranks != 1)}; {wanted} would do, as mpirun -n 2")


def _sizes(test, flags) -> list[int]:
    """What is measured; one size at least."""
    unit, told = ELEMENT if test.reduces else 1, flags.message_size
    if told is None:
        return sizes(*test.sizes, unit)
    low, _, high = told.rpartition(":")
    if not high.isdecimal() or not (low or "0").isdecimal() or int(low or 0) > int(high):
        raise ValueError(f"--message-size {told}: expected MIN:MAX in bytes, such as 4:1048576")
    low = int(low) if low else test.sizes[0]
    if not (found := sizes(low, int(high), unit)):
        least = max(-(-low // unit), 1) * unit
        raise ValueError(f"--message-size {told}: holds no size, the first is {least} bytes; such as {least}:1048576")
    return found


def _check_memory(test, flags) -> None:
    """Gives --buffer its value; errors name what was typed."""
    if flags.memory and (len(flags.memory) != 2 or set(flags.memory) - {"D", "H"}):
        raise ValueError(f"{' '.join(flags.memory)}: expected two words, such as D D or H D")
    asked = f"--buffer {flags.buffer}"
    if flags.accelerator or "D" in flags.memory:
        device = f"-d {flags.accelerator}" if flags.accelerator else " ".join(flags.memory)
        if flags.buffer not in (None, "cupy"):
            raise ValueError(f"{asked}: {device} asks for buffers on the device, which are of --buffer cupy")
        flags.buffer, asked = "cupy", asked if flags.buffer else device
    flags.buffer = flags.buffer or "numpy"
    flags.asked = asked
    flags.on_device = flags.buffer == "cupy" and flags.memory != ["H", "H"]
    if flags.buffer == "cupy" and flags.algorithm not in OF_DEVICES:
        raise ValueError(
            f"--algorithm {flags.algorithm}: takes memory of the host only, beside {asked} expected "
            + " or ".join(each for each in test.algorithms if each in OF_DEVICES)
        )
    if flags.algorithm == "host" and not flags.on_device:
        raise ValueError("--algorithm host: copies from the device and back; beside it expected --buffer cupy")
    osu_memory.check(flags.buffer, asked)


def sizes(low: int, high: int, unit: int) -> list[int]:
    """As OSU has them: `low`, then doubled; of elements that are added up whole ones, at least one."""
    size, found = max(-(-low // unit) * unit, unit if unit > 1 else 0), []
    while size <= high:
        found.append(size)
        size = 2 * size or 1
    return found
