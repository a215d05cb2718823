/* The race detector against order worked out by closure, over long programs of every call that
 * orders or touches memory: streams of all kinds that come and go, memory that is freed and handed
 * out again, and histories that are swept all the time.
 *
 * A program runs until its first race, which must be reported at that very step; steps that would
 * race are mostly left out, so that programs are long and their one race comes late. And what a
 * program without queries is blamed for is the same on every schedule. */
#include "sim_test.h"

enum { STREAMS = 5, EVENTS = 4, BLOCKS = 3, CELLS = 16, CELL = 64, STEPS = 200, PROGRAMS = 240 };
enum { HOST = STREAMS, ACTORS };
enum { LEGACY = 4 }; /* the first two streams do not block it, the next two do */

struct step {
    int actor;
    int copy;               /* or memset, or store: memory is not freed under it */
    unsigned reads, writes; /* bit sets of cells, of device block `block` */
    unsigned block;
    unsigned host_reads, host_writes; /* of the host's cells */
};

struct program {
    struct step steps[STEPS];
    /* after[i][j]: step i is ordered after step j. */
    unsigned char after[STEPS][STEPS];
    OOCUstream streams[STREAMS];
    OOCUevent events[EVENTS];
    OOCUdeviceptr blocks[BLOCKS];
    char *host;
    OOCUmodule module;
    OOCUfunction store;
    int last[ACTORS], recorded[EVENTS], born[BLOCKS];
    uint64_t random;
    int queries; /* whether the program asks: the answers depend on the schedule */
    int n;
};

static unsigned draw(struct program *p, unsigned below) {
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(p->random >> 33) % below;
}

static void order(struct program *p, int before) {
    for (int k = 0; before >= 0 && k < p->n; k++)
        p->after[p->n][k] |= (unsigned char)(k == before || p->after[before][k]);
}

static int blocking(int actor) { return actor == 2 || actor == 3; }

/* The new step belongs to `actor`: after its last one, after what the host knows, and after what
 * the legacy stream and those that block it owe each other. */
static struct step *next_step(struct program *p, int actor) {
    struct step *step = &p->steps[p->n];
    memset(step, 0, sizeof *step);
    memset(p->after[p->n], 0, sizeof p->after[p->n]);
    step->actor = actor;
    order(p, p->last[actor]);
    if (actor != HOST)
        order(p, p->last[HOST]);
    for (int k = p->n - 1; k >= 0; k--)
        if (!p->after[p->n][k] && ((actor == LEGACY && blocking(p->steps[k].actor)) ||
                                   (blocking(actor) && p->steps[k].actor == LEGACY)))
            order(p, k);
    return step;
}

/* The host has waited for all that was queued on `stream`. */
static void host_waits_for(struct program *p, int stream) {
    for (int k = p->n - 1; k >= 0; k--)
        if (stream == LEGACY && blocking(p->steps[k].actor) && !p->after[p->n][k])
            order(p, k);
    order(p, p->last[stream]);
}

static int races(const struct program *p) {
    const struct step *now = &p->steps[p->n];
    for (int k = 0; k < p->n; k++) {
        const struct step *old = &p->steps[k];
        const int same = old->block == now->block && k >= p->born[now->block];
        const unsigned touched = same ? old->reads | old->writes : 0,
                       written = same ? old->writes : 0;
        if (!p->after[p->n][k] && ((now->writes & touched) | (now->reads & written) |
                                   (now->host_writes & (old->host_reads | old->host_writes)) |
                                   (now->host_reads & old->host_writes)))
            return 1;
    }
    return 0;
}

static unsigned any_cells(struct program *p, unsigned *first, unsigned *count) {
    *first = draw(p, CELLS);
    *count = 1 + draw(p, CELLS - *first);
    return ((1u << *count) - 1) << *first;
}

/* Streams that come and go make the detector sweep its history, and use its numbers again. */
static void sweep(void) {
    for (int i = 0; i < 64; i++)
        OK(cu.cuStreamDestroy(new_stream()));
}

static OOCUstream stream_of_kind(int i) {
    OOCUstream stream = NULL; /* the legacy one */
    if (i != LEGACY)
        OK(cu.cuStreamCreateWithPriority(
            &stream, blocking(i) ? OOCU_STREAM_DEFAULT : OOCU_STREAM_NON_BLOCKING, 0));
    return stream;
}

/* Free a block and get one, most likely the same bytes, which have no history then. Refused while a
 * copy may use it that the host has not waited for. */
static void renew(struct program *p, unsigned block) {
    for (int k = p->born[block]; k < p->n; k++)
        if (p->steps[k].copy && p->steps[k].block == block &&
            (p->last[HOST] < 0 || !p->after[p->last[HOST]][k]))
            return;
    OK(cu.cuMemFree(p->blocks[block]));
    p->blocks[block] = device_bytes(CELLS * CELL);
    p->born[block] = p->n;
}

/* Carry out one access of any kind; `actor` is HOST or a stream. Returns 0 when it would race and
 * shall not. */
static int touch(struct program *p, int actor, int may_race) {
    struct step *step = next_step(p, actor);
    unsigned first, count, first_too, count_too;
    const unsigned set = any_cells(p, &first, &count), more = any_cells(p, &first_too, &count_too);
    const unsigned kind = actor == HOST ? 6 + draw(p, 2) : draw(p, 6), is_write = draw(p, 2),
                   writes_too = draw(p, 2);
    step->block = draw(p, BLOCKS);
    switch (kind) {
    case 0: /* a kernel that reads and writes, or reads twice, or writes twice */
        *(is_write ? &step->writes : &step->reads) |= set;
        *(writes_too ? &step->writes : &step->reads) |= more;
        break;
    case 1:
    case 7:
        *(is_write ? &step->writes : &step->reads) = set;
        break;
    case 2:
        step->copy = 1;
        step->writes = set;
        break;
    case 3: /* one word */
        step->copy = 1;
        step->writes = 1u << first;
        break;
    case 4:
    case 5: /* to the device, from it */
        step->copy = 1;
        *(kind == 4 ? &step->writes : &step->reads) = set;
        *(kind == 4 ? &step->host_reads : &step->host_writes) = set;
        break;
    default:
        *(is_write ? &step->host_writes : &step->host_reads) = set;
    }
    if (races(p) && !may_race)
        return 0;
    const OOCUdeviceptr device = p->blocks[step->block];
    const OOCUstream stream = actor == HOST ? NULL : p->streams[actor];
    const size_t at = (size_t)first * CELL, bytes = (size_t)count * CELL;
    const OOSimRange one = {device + at, bytes},
                     two = {device + (size_t)first_too * CELL, (size_t)count_too * CELL};
    OOSimRange reads[2], writes[2];
    size_t n_reads = 0, n_writes = 0;
    switch (kind) {
    case 0:
        *(is_write ? &writes[n_writes++] : &reads[n_reads++]) = one;
        *(writes_too ? &writes[n_writes++] : &reads[n_reads++]) = two;
        OK(cu.simLaunch(stream, reads, n_reads, writes, n_writes, 1e-6));
        break;
    case 1:
        OK(cu.simLaunch(stream, &one, !is_write, &one, is_write, 1e-6));
        break;
    case 2:
        OK(cu.cuMemsetD32Async(one.ptr, 7, bytes / 4, stream));
        break;
    case 3: {
        uint64_t address = one.ptr;
        unsigned value = 9;
        void *parameters[] = {&address, &value};
        OK(cu.cuLaunchKernel(p->store, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
        break;
    }
    case 4:
        OK(cu.cuMemcpyHtoDAsync(one.ptr, p->host + at, bytes, stream));
        break;
    case 5:
        OK(cu.cuMemcpyDtoHAsync(p->host + at, one.ptr, bytes, stream));
        break;
    case 6:
        OK(cu.simHostAccess(p->host + at, bytes, (int)is_write));
        break;
    default:
        OK(cu.simHostAccess((void *)one.ptr, bytes, (int)is_write));
    }
    return 1;
}

/* One step of any kind; 0 when none was made. */
static int one_step(struct program *p, int may_race) {
    const unsigned kind = draw(p, 24), e = draw(p, EVENTS);
    const int s = (int)draw(p, STREAMS);
    if (kind < 8)
        return touch(p, s, may_race);
    if (kind < 10)
        return touch(p, HOST, may_race);
    if (kind < 13) {
        (void)next_step(p, s);
        OK(cu.cuEventRecord(p->events[e], p->streams[s]));
        p->recorded[e] = p->n;
        return 1;
    }
    if (kind < 17) {
        (void)next_step(p, s);
        OK(cu.cuStreamWaitEvent(p->streams[s], p->events[e], 0));
        order(p, p->recorded[e]);
        return p->recorded[e] >= 0; /* waiting for nothing is no operation */
    }
    switch (kind) {
    case 17:
        (void)next_step(p, HOST);
        OK(cu.cuEventSynchronize(p->events[e]));
        order(p, p->recorded[e]);
        return 1;
    case 18:
        if (draw(p, 3))
            return 0;
        (void)next_step(p, HOST);
        OK(cu.cuStreamSynchronize(p->streams[s]));
        host_waits_for(p, s);
        return 1;
    case 19: {
        if (!p->queries)
            return 0;
        (void)next_step(p, HOST);
        const int of_event = (int)draw(p, 2);
        const OOCUresult ready =
            of_event ? cu.cuEventQuery(p->events[e]) : cu.cuStreamQuery(p->streams[s]);
        CHECK(ready == OOCU_SUCCESS || ready == OOCU_ERROR_NOT_READY, "a query: %d", ready);
        if (ready == OOCU_SUCCESS && of_event)
            order(p, p->recorded[e]);
        else if (ready == OOCU_SUCCESS)
            host_waits_for(p, s);
        return 1;
    }
    case 20:
        sweep();
        return 0;
    case 21: /* what it had queued stays queued, and nothing later is ordered after it, but for
                what waits for its records; the legacy stream waits for it all the same */
        if (s == LEGACY)
            return 0;
        OK(cu.cuStreamDestroy(p->streams[s]));
        p->streams[s] = stream_of_kind(s);
        p->last[s] = -1;
        return 0;
    case 22:
        OK(cu.cuEventDestroy(p->events[e]));
        p->events[e] = new_event();
        p->recorded[e] = -1;
        return 0;
    default:
        renew(p, draw(p, BLOCKS));
        return 0;
    }
}

static void begin(struct program *p, int schedule, uint64_t seed, uint64_t program) {
    memset(p, 0, sizeof *p);
    p->random = program * 0x9E3779B97F4A7C15u + 1;
    sim_test_begin(schedule, seed);
    for (int i = 0; i < STREAMS; i++)
        p->streams[i] = stream_of_kind(i);
    for (int i = 0; i < EVENTS; i++)
        p->events[i] = new_event();
    for (int i = 0; i < BLOCKS; i++)
        p->blocks[i] = device_bytes(CELLS * CELL);
    p->host = host_bytes(CELLS * CELL);
    OK(cu.cuModuleLoadData(&p->module, ".version 7.0"));
    OK(cu.cuModuleGetFunction(&p->store, p->module, "store"));
    for (int i = 0; i < ACTORS; i++)
        p->last[i] = -1;
    for (int i = 0; i < EVENTS; i++)
        p->recorded[i] = -1;
}

static void end(struct program *p) {
    OK(cu.cuModuleUnload(p->module));
    OK(cu.simReportsClear());
    sim_test_end();
}

CASE(the_first_race_is_reported_when_it_happens) {
    static struct program p;
    unsigned raced = 0, steps = 0;
    for (uint64_t number = 1; number <= PROGRAMS && !check_failed; number++) {
        begin(&p, (int)(number % 6), number, number);
        p.queries = number % 2 != 0;
        int race = -1;
        while (p.n < STEPS && race < 0) {
            if (!one_step(&p, draw(&p, 64) == 0))
                continue;
            race = races(&p) ? p.n : -1;
            CHECK((cu.simReportCount() > 0) == (race >= 0),
                  "program %llu: %llu reports at step %d, which %s", (unsigned long long)number,
                  (unsigned long long)cu.simReportCount(), p.n, race >= 0 ? "races" : "is ordered");
            if (check_failed)
                print_reports();
            p.last[p.steps[p.n].actor] = p.n;
            p.n++;
            steps++;
        }
        raced += race >= 0;
        end(&p);
    }
    CHECK(raced > PROGRAMS / 4 && raced < PROGRAMS, "%u programs race", raced);
    printf("%d programs, %u steps; %u end with a race\n", PROGRAMS, steps, raced);
}

/* What is ordered before all that can come is forgotten by the next sweep. */
CASE(history_ends_where_the_host_has_waited) {
    static struct program p;
    struct sim_live live;
    for (uint64_t number = 1; number <= 12; number++) {
        begin(&p, (int)(number % 6), number, number);
        for (; p.n < STEPS / 2; p.n++) {
            const int actor = (int)draw(&p, ACTORS);
            (void)touch(&p, actor, 1);
            p.last[actor] = p.n;
        }
        OK(cu.simGetLive(&live));
        CHECK(live.history > 0 && live.history <= (BLOCKS + 1) * CELLS, "%llu intervals",
              (unsigned long long)live.history);
        for (int i = 0; i < STREAMS; i++)
            OK(cu.cuStreamSynchronize(p.streams[i]));
        sweep();
        OK(cu.simGetLive(&live));
        CHECK(live.history == 0, "program %llu: %llu intervals are remembered",
              (unsigned long long)number, (unsigned long long)live.history);
        end(&p);
    }
}

/* A report without its addresses and its last line, which names the schedule. */
static uint64_t hash_of_reports(void) {
    static char text[4096];
    uint64_t hash = 14695981039346656037u;
    for (uint64_t i = 0; i < cu.simReportCount(); i++) {
        OK(cu.simReport(i, text, sizeof text));
        char *schedule = strstr(text, "  schedule:");
        if (schedule)
            *schedule = 0;
        for (const char *c = text; *c; c++) {
            if (c[0] == '0' && c[1] == 'x')
                while (*c && *c != ',')
                    c++;
            hash = (hash ^ (unsigned char)*c) * 1099511628211u;
        }
    }
    return hash;
}

CASE(races_do_not_depend_on_the_schedule) {
    static struct program p;
    uint64_t reports = 0;
    for (uint64_t number = 1; number <= PROGRAMS / 6 && !check_failed; number++) {
        uint64_t expected = 0;
        for (int schedule = SIM_TIMED; schedule <= SIM_DELAYED + 3; schedule++) {
            /* Random three more times, with other seeds. */
            begin(&p, schedule > SIM_DELAYED ? SIM_RANDOM : schedule, (uint64_t)schedule * 7,
                  number + 5000);
            while (p.n < STEPS) {
                if (!one_step(&p, draw(&p, 8) == 0))
                    continue;
                p.last[p.steps[p.n].actor] = p.n;
                p.n++;
            }
            const uint64_t hash = hash_of_reports();
            if (schedule == SIM_TIMED)
                expected = hash;
            CHECK(hash == expected, "program %llu: other races on schedule %d, %llu reports",
                  (unsigned long long)number, schedule, (unsigned long long)cu.simReportCount());
            reports += cu.simReportCount();
            end(&p);
        }
    }
    CHECK(reports > 0, "no program races");
    printf("%llu reports, the same on every schedule\n", (unsigned long long)reports);
}

CHECK_MAIN(sim_test_open)
