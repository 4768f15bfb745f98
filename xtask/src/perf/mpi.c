/* The other side of `cargo xtask perf --against mpi`: Open MPI's all-reduce of floats.
 *
 * Rank 0 reads lines `BYTES REPETITIONS in|out` and answers each with one line of results. Between rounds every rank
 * sleeps: the others on semaphores in shared memory, since a rank that waits inside MPI spins.
 *
 * A repetition is an application's: every rank writes its input, all-reduces, and reads its output. The same without the
 * all-reduce is timed too. Each is timed from the first rank's start to the last rank's end. */
#include <mpi.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_RANKS 64
#define MOST_REPETITIONS 10000

struct shared {
    sem_t go[MOST_RANKS];
    size_t count;
    int repetitions, in_place, end;
    double begin[MOST_RANKS], done[MOST_RANKS];
    long wrong[MOST_RANKS];
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t); /* one clock for all processes */
    return 1e6 * t.tv_sec + 1e-3 * t.tv_nsec;
}

static float value(size_t i, int rank, int which) { return (float)((i * 31 + rank * 17 + which * 7) % 127); }

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count) {
    qsort(times, count, sizeof *times, ascending);
    return times[count / 2];
}

/* As the dispatches do it: one multiplication keeps it from becoming a memcpy, whose stores may bypass the caches. */
static void move(float *to, const float *from, size_t count, float by) {
    for (size_t i = 0; i < count; i++) to[i] = from[i] * by;
}

static float *room(size_t count) {
    float *data = malloc(count * sizeof *data);
    if (!data) MPI_Abort(MPI_COMM_WORLD, 3);
    for (size_t i = 0; i < count; i++) data[i] = -1;
    return data;
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks > MOST_RANKS) MPI_Abort(MPI_COMM_WORLD, 2);

    MPI_Win window;
    struct shared *shared;
    MPI_Win_allocate_shared(rank ? 0 : sizeof *shared, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &shared, &window);
    if (rank) {
        MPI_Aint size;
        int unit;
        MPI_Win_shared_query(window, 0, &size, &unit, &shared);
    } else {
        memset(shared, 0, sizeof *shared);
        for (int r = 0; r < ranks; r++) sem_init(&shared->go[r], 1, 0);
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length;
        MPI_Get_library_version(version, &length);
        printf("%.*s\n", (int)strcspn(version, ","), version);
        fflush(stdout);
    }
    MPI_Barrier(MPI_COMM_WORLD);

    volatile float one = 1;
    size_t had = 0;
    float *templates[2] = {0}, *sums[2] = {0}, *input = 0, *output = 0, *seen = 0;
    static double whole[MOST_REPETITIONS], own[MOST_REPETITIONS], net[MOST_REPETITIONS];
    for (;;) {
        if (rank == 0) {
            char line[256], place[8];
            size_t bytes;
            int asked = fgets(line, sizeof line, stdin) != 0;
            if (asked && sscanf(line, "%zu %d %7s", &bytes, &shared->repetitions, place) != 3) MPI_Abort(MPI_COMM_WORLD, 2);
            shared->end = !asked;
            shared->count = asked ? bytes / sizeof(float) : 0;
            shared->in_place = asked && !strcmp(place, "in");
            if (shared->repetitions >= MOST_REPETITIONS) MPI_Abort(MPI_COMM_WORLD, 2);
            for (int r = 1; r < ranks; r++) sem_post(&shared->go[r]);
        } else {
            while (sem_wait(&shared->go[rank])) {}
        }
        if (shared->end) break;

        size_t count = shared->count;
        int repetitions = shared->repetitions, in_place = shared->in_place;
        if (count != had) {
            float **all[] = {&templates[0], &templates[1], &sums[0], &sums[1], &input, &output, &seen};
            for (int i = 0; i < 7; i++) {
                free(*all[i]);
                *all[i] = room(count);
            }
            for (int which = 0; which < 2; which++)
                for (size_t i = 0; i < count; i++) {
                    templates[which][i] = value(i, rank, which);
                    sums[which][i] = 0;
                    for (int r = 0; r < ranks; r++) sums[which][i] += value(i, r, which);
                }
            had = count;
        }
        float *result = in_place ? input : output;
        shared->wrong[rank] = 0;
        /* The first repetition of each warms up. */
        for (int repetition = 0; repetition <= repetitions; repetition++) {
            int which = repetition % 2;
            for (int with = 1; with >= 0; with--) {
                MPI_Barrier(MPI_COMM_WORLD);
                shared->begin[rank] = now();
                move(input, templates[which], count, one);
                if (with)
                    MPI_Allreduce(in_place ? MPI_IN_PLACE : input, result, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                move(seen, result, count, one);
                shared->done[rank] = now();
                MPI_Barrier(MPI_COMM_WORLD);
                if (with)
                    for (size_t i = 0; i < count; i++) shared->wrong[rank] += seen[i] != sums[which][i];
                if (rank == 0) {
                    double begin = shared->begin[0], done = shared->done[0];
                    for (int r = 1; r < ranks; r++) {
                        if (shared->begin[r] < begin) begin = shared->begin[r];
                        if (shared->done[r] > done) done = shared->done[r];
                    }
                    (with ? whole : own)[repetition] = done - begin;
                }
            }
        }
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0) {
            long wrong = 0;
            for (int i = 1; i <= repetitions; i++) net[i] = whole[i] - own[i];
            for (int r = 0; r < ranks; r++) wrong += shared->wrong[r];
            printf("whole=%.3f own=%.3f net=%.3f wrong=%ld\n", median(whole + 1, repetitions), median(own + 1, repetitions),
                   median(net + 1, repetitions), wrong);
            fflush(stdout);
        }
    }
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
