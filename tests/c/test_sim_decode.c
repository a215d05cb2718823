/* The simulated kernels that decode weights: bits, order, time, and what they refuse. */
#include "sim_test.h"
#include "weights.h"

#include <math.h>

static const enum oo_codec_kind kinds[] = {OO_CODEC_BF16, OO_CODEC_FP8, OO_CODEC_INT8};

struct launch {
    OOCUmodule module;
    OOCUfunction function;
    OOCUdeviceptr chunk, weights;
    struct oo_codec_header header;
    uint32_t low_bits, rotate;
    char *host, *back; /* page-locked: the chunk, and room for the weights */
    char *expected;
    size_t bytes, weight_bytes;
};

static struct launch begin(int schedule, enum oo_codec_kind kind, enum what what, size_t count) {
    struct launch l = {.weight_bytes = count * oo_codec_weight_bytes(kind)};
    sim_test_begin(schedule, 1);
    l.host = host_bytes(oo_codec_room(kind, count));
    l.back = host_bytes(l.weight_bytes);
    l.expected = malloc(l.weight_bytes);
    draw_weights(kind, what, count, l.expected);
    if (count > 8192) /* one block is stored as it is */
        draw_weights(kind, RANDOM, 1024, l.expected + 3 * 1024 * oo_codec_weight_bytes(kind));
    CHECK(oo_codec_encode(oo_codec_best(), kind, l.expected, count, l.host, &l.bytes) == OO_OK,
          "encode");
    CHECK(oo_codec_read(l.host, l.bytes, &l.header) == OO_OK, "read");
    CHECK(l.header.mode == OO_CODEC_TIERS, "mode %u", l.header.mode);
    l.low_bits = l.header.low_bits;
    l.rotate = kind == OO_CODEC_FP8;
    l.chunk = device_bytes(l.bytes);
    l.weights = device_bytes(l.weight_bytes);
    OK(cu.cuModuleLoadData(&l.module, ".version 8.0"));
    OK(cu.cuModuleGetFunction(&l.function, l.module,
                              kind == OO_CODEC_BF16 ? "decode_bf16" : "decode_bytes"));
    return l;
}

static void end(struct launch *l) {
    OK(cu.cuModuleUnload(l->module));
    OK(cu.simReportsClear());
    free(l->expected);
    sim_test_end();
}

static OOCUresult decode(struct launch *l, OOCUstream stream, unsigned groups) {
    void *parameters[] = {&l->chunk,          &l->weights,  &l->header.count, &l->header.tail_words,
                          &l->header.palette, &l->low_bits, &l->rotate};
    return cu.cuLaunchKernel(l->function, groups, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}

static unsigned groups_of(const struct launch *l) { return (l->header.count + 8191) / 8192; }

CASE(copied_and_decoded_weights_have_their_bits) {
    static const size_t counts[] = {8192, 30 * 1024 + 77};
    static const enum what patterns[] = {GAUSSIAN, SPECIALS, RARE, BURSTS};
    unsigned raw_blocks = 0;
    seed = 1;
    for (int schedule = 0; schedule < 6; schedule++)
        for (size_t k = 0; k < 3; k++)
            for (size_t i = 0; i < 2; i++) {
                struct launch l = begin(schedule, kinds[k], patterns[(k + i) % 4], counts[i]);
                OOCUstream stream = new_stream();
                raw_blocks += (unsigned char)l.host[OO_CODEC_HEADER + 4 * 3 + 3] >> 7;
                OK(cu.cuMemcpyHtoDAsync(l.chunk, l.host, l.bytes, stream));
                OK(decode(&l, stream, groups_of(&l)));
                OK(cu.cuMemcpyDtoHAsync(l.back, l.weights, l.weight_bytes, stream));
                OK(cu.cuStreamSynchronize(stream));
                CHECK(!memcmp(l.back, l.expected, l.weight_bytes), "kind %zu, %zu weights", k,
                      counts[i]);
                CHECK(cu.simReportCount() == 0, "%llu reports",
                      (unsigned long long)cu.simReportCount());
                end(&l);
            }
    CHECK(raw_blocks == 18, "%u blocks are stored as they are", raw_blocks);
}

/* What reads the chunk before it has come, and what reads weights before they are there. */
CASE(a_missing_wait_is_a_race) {
    seed = 2;
    for (int missing = 0; missing < 2; missing++) {
        struct launch l = begin(0, OO_CODEC_BF16, GAUSSIAN, 8192);
        OOCUstream copies = new_stream(), decodes = new_stream(), computes = new_stream();
        OOCUevent come = new_event(), there = new_event();
        const OOSimRange used = {l.weights, l.weight_bytes};
        OK(cu.cuMemcpyHtoDAsync(l.chunk, l.host, l.bytes, copies));
        OK(cu.cuEventRecord(come, copies));
        if (missing != 0)
            OK(cu.cuStreamWaitEvent(decodes, come, 0));
        OK(decode(&l, decodes, groups_of(&l)));
        OK(cu.cuEventRecord(there, decodes));
        if (missing != 1)
            OK(cu.cuStreamWaitEvent(computes, there, 0));
        OK(cu.simLaunch(computes, &used, 1, NULL, 0, 1e-6));
        CHECK(cu.simReportCount() > 0, "wait %d is missing, and there is no report", missing);
        double end_s;
        OK(cu.simFinish(&end_s));
        end(&l);
    }
}

CASE(it_takes_what_memory_needs_for_its_bytes) {
    struct sim_device device;
    float ms = -1;
    seed = 3;
    struct launch l = begin(0, OO_CODEC_BF16, GAUSSIAN, 1 << 18);
    OOCUstream stream = new_stream();
    OOCUevent before = new_event(), after = new_event();
    OK(cu.simGetDevice(0, &device));
    OK(cu.cuMemcpyHtoDAsync(l.chunk, l.host, l.bytes, stream));
    OK(cu.cuEventRecord(before, stream));
    OK(decode(&l, stream, groups_of(&l)));
    OK(cu.cuEventRecord(after, stream));
    OK(cu.cuEventSynchronize(after));
    OK(cu.cuEventElapsedTime(&ms, before, after));
    const double expected =
        device.launch_s + (double)(l.bytes + l.weight_bytes) / (0.9e9 * device.memory_gbps);
    CHECK(fabs((double)ms * 1e-3 - expected) < 1e-9, "%g s, not %g", (double)ms * 1e-3, expected);
    end(&l);
}

/* As on a device: the launch is accepted, what it does is not. */
CASE(what_is_not_there_is_an_illegal_address) {
    for (int what = 0; what < 5; what++) {
        seed = 4;
        struct launch l = begin(0, OO_CODEC_INT8, GAUSSIAN, 3 * 8192);
        OOCUstream stream = new_stream();
        unsigned groups = groups_of(&l);
        l.chunk += what == 0 ? 8 : 0;
        l.weights += what == 1 ? 8 : 0;
        l.weights += what == 2 ? (OOCUdeviceptr)l.weight_bytes : 0;
        l.header.tail_words += what == 3 ? 1 << 28 : 0;
        groups -= what == 4;
        OK(decode(&l, stream, groups));
        IS(OOCU_ERROR_ILLEGAL_ADDRESS, cu.cuStreamSynchronize(stream));
        OK(cu.simFaultClear());
        end(&l);
    }
}

/* Noise behind the header: the engine's decoder may refuse it, a kernel cannot. */
CASE(noise_leads_nowhere) {
    for (int turn = 0; turn < 40; turn++) {
        seed = 100 + (uint64_t)turn;
        struct launch l = begin(0, kinds[turn % 3], RARE, 2 * 8192 + 5);
        OOCUstream stream = new_stream();
        uint8_t *payload = (uint8_t *)l.host + OO_CODEC_HEADER;
        for (size_t i = 0; i < (turn % 2 ? 3 : l.bytes); i++)
            payload[draw() % (l.bytes - OO_CODEC_HEADER)] ^= (uint8_t)draw();
        OK(cu.cuMemcpyHtoDAsync(l.chunk, l.host, l.bytes, stream));
        OK(decode(&l, stream, groups_of(&l)));
        OK(cu.cuStreamSynchronize(stream));
        end(&l);
    }
}

CHECK_MAIN(sim_test_open)
