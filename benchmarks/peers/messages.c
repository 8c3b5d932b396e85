/* Latency and bandwidth between two ranks, with nothing between them and MPI: what osu_latency.py and osu_bw.py are
   compared with.

       mpicc -O2 messages.c -o messages
       mpirun -n 2 ./messages latency|bw ITERATIONS WARMUP WINDOW HUGE SIZE...

   Prints a line for each size: bytes, then microseconds one way, or MB/s (10^6 bytes). HUGE 1 asks for huge pages. Each
   rank keeps to the core of its number. */

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2UL << 20)
#define MOST 1024 /* messages of a window */

static char *allocate(size_t bytes, int huge) {
    size_t length = (bytes / PAGE + 2) * PAGE;
    char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        MPI_Abort(MPI_COMM_WORLD, 1);
    madvise(memory, length, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memory += (PAGE - (size_t)memory % PAGE) % PAGE;
    memset(memory, 1, bytes + 1);
    return memory;
}

static void ping_pong(int rank, char *out, char *in, int size) {
    for (int turn = 0; turn < 2; turn++)
        if (turn == rank)
            MPI_Send(out, size, MPI_CHAR, 1 - rank, 1, MPI_COMM_WORLD);
        else
            MPI_Recv(in, size, MPI_CHAR, 1 - rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void stream(int rank, char *out, char *in, int size, int window) {
    static MPI_Request requests[MOST];
    char answer[4] = {0};
    for (int each = 0; each < window; each++)
        if (rank == 0)
            MPI_Isend(out, size, MPI_CHAR, 1, 1, MPI_COMM_WORLD, &requests[each]);
        else
            MPI_Irecv(in, size, MPI_CHAR, 0, 1, MPI_COMM_WORLD, &requests[each]);
    MPI_Waitall(window, requests, MPI_STATUSES_IGNORE);
    if (rank == 0)
        MPI_Recv(answer, 4, MPI_CHAR, 1, 101, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else
        MPI_Send(answer, 4, MPI_CHAR, 0, 101, MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    int rank, ranks, level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 7 || ranks != 2 || atoi(argv[4]) < 1 || atoi(argv[4]) > MOST) {
        fprintf(stderr, "messages: latency|bw ITERATIONS WARMUP WINDOW HUGE SIZE..., on two ranks\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    int latency = !strcmp(argv[1], "latency"), iterations = atoi(argv[2]), warmup = atoi(argv[3]);
    int window = atoi(argv[4]), huge = atoi(argv[5]);
    cpu_set_t allowed, own;
    CPU_ZERO(&own);
    if (!sched_getaffinity(0, sizeof allowed, &allowed) && CPU_ISSET(rank, &allowed)) {
        CPU_SET(rank, &own);
        sched_setaffinity(0, sizeof own, &own);
    }
    for (int each = 6; each < argc; each++) {
        int size = atoi(argv[each]);
        char *out = allocate(size, huge), *in = allocate(size, huge);
        double began = 0;
        for (int number = -warmup; number < iterations; number++) {
            if (number == 0) {
                MPI_Barrier(MPI_COMM_WORLD);
                began = MPI_Wtime();
            }
            if (latency)
                ping_pong(rank, out, in, size);
            else
                stream(rank, out, in, size, window);
        }
        double seconds = (MPI_Wtime() - began) / iterations;
        if (rank == 0)
            printf("%d %.4f\n", size, latency ? seconds * 1e6 / 2 : (double)size * window / seconds / 1e6);
    }
    MPI_Finalize();
    return 0;
}
