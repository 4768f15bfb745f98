// The other side of `cargo xtask perf --against nccl`: NCCL's all-reduce of floats, one process, all GPUs.
//
// The first line says how many GPUs there are, and what they are. Each line `BYTES REPETITIONS` on standard input is then
// answered with the time of a call that is waited for before the next (`call`, the median) and of calls that follow each
// other (`train`, the mean), in microseconds. Waiting is spinning on the streams.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>
#include <nccl.h>

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}
static void check(cudaError_t e, const char *what) {
    if (e != cudaSuccess) fail(what, cudaGetErrorString(e));
}
static void check(ncclResult_t e, const char *what) {
    if (e != ncclSuccess) fail(what, ncclGetErrorString(e));
}
#define CHECK(call) check(call, #call)

struct Gpu {
    cudaStream_t stream;
    ncclComm_t comm;
    float *input = nullptr, *output = nullptr;
};

static float value(size_t i, size_t rank) { return float((i * 31 + rank * 17) % 127); }

static double now() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

static void start(std::vector<Gpu> &gpus, size_t count) {
    CHECK(ncclGroupStart());
    for (Gpu &g : gpus) CHECK(ncclAllReduce(g.input, g.output, count, ncclFloat, ncclSum, g.comm, g.stream));
    CHECK(ncclGroupEnd());
}

static void wait(std::vector<Gpu> &gpus) {
    for (Gpu &g : gpus) {
        cudaError_t e;
        while ((e = cudaStreamQuery(g.stream)) == cudaErrorNotReady) {}
        check(e, "cudaStreamQuery");
    }
}

// What no sum is, everywhere.
static void poison(std::vector<Gpu> &gpus, size_t count) {
    for (size_t r = 0; r < gpus.size(); r++) {
        CHECK(cudaSetDevice(int(r)));
        CHECK(cudaMemset(gpus[r].output, 0xff, count * sizeof(float)));
        CHECK(cudaDeviceSynchronize());
    }
}

static long wrong(std::vector<Gpu> &gpus, const std::vector<float> &sums, std::vector<float> &got) {
    long wrong = 0;
    for (Gpu &g : gpus) {
        CHECK(cudaMemcpy(got.data(), g.output, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < got.size(); i++) wrong += got[i] != sums[i];
    }
    return wrong;
}

int main() {
    int count_of_gpus = 0, version = 0;
    if (cudaGetDeviceCount(&count_of_gpus) != cudaSuccess) count_of_gpus = 0;
    CHECK(ncclGetVersion(&version));
    cudaDeviceProp properties = {};
    if (count_of_gpus > 0) CHECK(cudaGetDeviceProperties(&properties, 0));
    printf("%d GPUs, %s, NCCL %d.%d.%d\n", count_of_gpus, properties.name, version / 10000, version / 100 % 100, version % 100);
    fflush(stdout);
    if (count_of_gpus < 2) return 0;

    std::vector<Gpu> gpus(count_of_gpus);
    std::vector<ncclComm_t> comms(gpus.size());
    CHECK(ncclCommInitAll(comms.data(), count_of_gpus, nullptr));
    for (size_t r = 0; r < gpus.size(); r++) {
        CHECK(cudaSetDevice(int(r)));
        CHECK(cudaStreamCreateWithFlags(&gpus[r].stream, cudaStreamNonBlocking));
        gpus[r].comm = comms[r];
    }
    size_t bytes;
    int repetitions;
    while (scanf("%zu %d", &bytes, &repetitions) == 2) {
        size_t count = bytes / sizeof(float);
        repetitions = std::max(repetitions, 1);
        std::vector<float> data(count), sums(count, 0), got(count);
        for (size_t r = 0; r < gpus.size(); r++) {
            CHECK(cudaSetDevice(int(r)));
            CHECK(cudaMalloc(&gpus[r].input, bytes));
            CHECK(cudaMalloc(&gpus[r].output, bytes));
            for (size_t i = 0; i < count; i++) sums[i] += data[i] = value(i, r);
            CHECK(cudaMemcpy(gpus[r].input, data.data(), bytes, cudaMemcpyHostToDevice));
        }
        poison(gpus, count);
        std::vector<double> calls;
        for (int repetition = 0; repetition <= repetitions; repetition++) {
            double begin = now();
            start(gpus, count);
            wait(gpus);
            if (repetition > 0) calls.push_back(now() - begin); // the first warms up
        }
        std::sort(calls.begin(), calls.end());
        long bad = wrong(gpus, sums, got);
        poison(gpus, count);
        double begin = now();
        for (int repetition = 0; repetition < repetitions; repetition++) start(gpus, count);
        wait(gpus);
        double train = (now() - begin) / repetitions;
        bad += wrong(gpus, sums, got);
        for (size_t r = 0; r < gpus.size(); r++) {
            CHECK(cudaSetDevice(int(r)));
            CHECK(cudaFree(gpus[r].input));
            CHECK(cudaFree(gpus[r].output));
        }
        printf("call=%.3f train=%.3f wrong=%ld\n", calls[calls.size() / 2], train, bad);
        fflush(stdout);
    }
    return 0;
}
