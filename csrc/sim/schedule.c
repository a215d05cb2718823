/* schedule.c - streams, events and queued operations: what may run, what does run, and when.
 *
 * Each operation counts its predecessors (the one before it in its stream; the recorded one it
 * waits for; the legacy stream's) twice: those not yet executed, and those whose virtual end has
 * not come.
 *
 * Execution: an operation without unexecuted predecessors is *runnable*; the schedule chooses among
 * those. A copy that becomes runnable poisons its destination: from then on the bytes are the
 * copy's, and what was there before must not be relied on.
 *
 * Virtual time: an event simulation that never runs ahead of the host. It moves only when the host
 * does (a wait, a query, simAdvance), at most as far; whatever is queued later begins later. So the
 * order of starts on an engine never has to be revised, and times do not depend on when operations
 * were executed.
 */
#include "sim_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum outcome { RAN, WAITS_FOR_HOST_FUNCTION, STUCK };
enum moment_kind { MOMENT_END = 0, MOMENT_READY = 1 };

struct moment {
    double s;
    uint64_t seq;
    enum moment_kind kind;
    struct sim_op *op;
};

static struct moment *heap;
static size_t n_heap, heap_capacity;
static double clock_s; /* of the event simulation; never above sim.now_s between calls */
static uint64_t next_seq;
static struct sim_op *spare_ops;
static struct sim_edge *spare_edges;
static struct sim_op **fresh; /* became runnable, perhaps not poisoned yet */
static size_t n_fresh, fresh_capacity;
static struct sim_op **stack;
static size_t stack_capacity;
static int has_driver_thread;
static uint64_t n_host_functions; /* queued, not yet executed */

/* ---- small parts ---- */

static uint64_t draw(void) {
    sim.random += 0x9E3779B97F4A7C15u;
    uint64_t z = sim.random;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double sim__copy_cost(int device, size_t bytes) {
    const struct sim_device *d = &sim.devices[device];
    return d->copy_latency_s + (double)bytes / (d->link_gbps * 1e9);
}

static int is_copy(const struct sim_op *op) { return op->kind == OP_H2D || op->kind == OP_D2H; }
static int is_marker(const struct sim_op *op) {
    return op->kind == OP_RECORD || op->kind == OP_WAIT;
}

void sim__op_ref(struct sim_op *op) { op->refs++; }

void sim__op_unref(struct sim_op *op) {
    if (--op->refs)
        return;
    for (struct sim_edge *edge = op->in, *next; edge; edge = next) {
        next = edge->next_in;
        edge->next_in = spare_edges;
        spare_edges = edge;
    }
    free(op->decode);
    op->decode = NULL;
    op->next = spare_ops;
    spare_ops = op;
}

void sim__event_clear(struct sim_event *event) {
    if (event->op)
        sim__op_unref(event->op);
    event->op = NULL;
}

/* Whether data move when their virtual time has come. */
static int by_time(void) { return sim.schedule == SIM_TIMED || sim.schedule == SIM_DELAYED; }

/* ---- the heap of moments ---- */

static int earlier(const struct moment *a, const struct moment *b) {
    if (a->s < b->s || b->s < a->s)
        return a->s < b->s;
    if (a->kind != b->kind)
        return a->kind < b->kind;
    return a->seq < b->seq;
}

static void heap_push(double s, enum moment_kind kind, struct sim_op *op) {
    heap = sim__grow(heap, &heap_capacity, n_heap + 1, sizeof *heap);
    struct moment moment = {.s = s, .seq = op->seq, .kind = kind, .op = op};
    size_t i = n_heap++;
    while (i > 0 && earlier(&moment, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = moment;
}

static struct moment heap_pop(void) {
    struct moment top = heap[0], last = heap[--n_heap];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n_heap)
            break;
        if (child + 1 < n_heap && earlier(&heap[child + 1], &heap[child]))
            child++;
        if (!earlier(&heap[child], &last))
            break;
        heap[i] = heap[child];
        i = child;
    }
    if (n_heap)
        heap[i] = last;
    return top;
}

/* ---- life of an operation ---- */

static void stream_free(struct sim_stream *stream) {
    struct sim_stream **at = &sim.streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    sim__actor_gone(stream->actor);
    sim__clock_free(&stream->clock);
    free(stream);
}

/* Forget the operations at the head that are both executed and ended. */
static void retire(struct sim_stream *stream) {
    while (stream->head && stream->head->executed && stream->head->ended) {
        struct sim_op *op = stream->head;
        stream->head = op->next;
        if (!stream->head)
            stream->tail = NULL;
        stream->depth--;
        sim__op_unref(op);
    }
    if (stream->destroyed && !stream->head)
        stream_free(stream);
}

static void unlink_done(struct sim_op *op) {
    if (!op->executed || !op->ended)
        return;
    for (struct sim_edge *edge = op->out; edge; edge = edge->next_out)
        edge->from = NULL;
    op->out = NULL;
}

static void not_runnable(struct sim_op *op) {
    if (!op->runnable_at)
        return;
    struct sim_op *last = sim.runnable[--sim.n_runnable];
    sim.runnable[op->runnable_at - 1] = last;
    last->runnable_at = op->runnable_at;
    op->runnable_at = 0;
}

static void become_runnable(struct sim_op *op) {
    if (op->executed || op->runnable_at || op->stream->held || !op->submitted)
        return;
    sim.runnable = sim__grow(sim.runnable, &sim.runnable_capacity, sim.n_runnable + 1,
                             sizeof(struct sim_op *));
    sim.runnable[sim.n_runnable] = op;
    op->runnable_at = ++sim.n_runnable;
    if (is_copy(op) && !op->poisoned) {
        fresh = sim__grow(fresh, &fresh_capacity, n_fresh + 1, sizeof *fresh);
        fresh[n_fresh++] = op;
        sim__op_ref(op);
    }
}

/* Poison the destinations of copies that have become runnable. Must come before anything else reads
 * or writes memory. */
static void settle(void) {
    while (n_fresh) {
        struct sim_op *op = fresh[--n_fresh];
        if (!op->executed && !op->poisoned) {
            op->poisoned = 1;
            if (!sim.switches[SIM_COPY_NOTHING])
                sim__poison(op->dst, op->bytes);
        }
        sim__op_unref(op);
    }
}

static void time_ready(struct sim_op *op) {
    if (!op->stream->held && op->submitted)
        heap_push(op->ready_s, MOMENT_READY, op);
}

static void move_data(struct sim_op *op) {
    if (is_copy(op) && !sim.switches[SIM_COPY_NOTHING]) {
        memmove(op->dst, op->src, op->bytes);
    } else if (op->decode) {
        if (!sim.switches[SIM_COPY_NOTHING]) /* else there is nothing to decode */
            sim__decode(op->decode);
    } else if (op->kind == OP_MEMSET || (op->kind == OP_KERNEL && op->dst)) {
        unsigned char *at = op->dst;
        for (size_t i = 0; i < op->bytes; i += sizeof op->value)
            memcpy(at + i, &op->value, sizeof op->value);
    }
}

/* Everything that follows from `op` having been executed. Host functions end here, too. */
static void mark_executed(struct sim_op *op) {
    struct sim_stream *stream = op->stream;
    not_runnable(op);
    op->executed = 1;
    sim.n_queued--;
    if (op->next && !op->next->executed && --op->next->wait_exec == 0)
        become_runnable(op->next);
    /* Executed ones can follow only when they were discarded while a host function ran. */
    for (stream->exec_head = op->next; stream->exec_head && stream->exec_head->executed;)
        stream->exec_head = stream->exec_head->next;
    for (struct sim_edge *edge = op->out; edge; edge = edge->next_out) {
        edge->executed = 1;
        if (edge->counted_exec && --edge->to->wait_exec == 0)
            become_runnable(edge->to);
    }
    unlink_done(op);
    retire(stream);
}

static void execute(struct sim_op *op) {
    op->poisoned = 1; /* it gets its bytes at once */
    settle();
    move_data(op);
    enum sim_op_kind kind = op->kind;
    OOCUresult fails = op->fails;
    mark_executed(op);
    sim__async(kind, fails);
}

/* Execute what has been waiting only for its predecessors since its time came. */
static void execute_due(void) {
    for (size_t i = 0; i < sim.n_runnable;) {
        struct sim_op *op = sim.runnable[i];
        if (op->due && op->kind != OP_HOSTFN) {
            execute(op);
            i = 0;
        } else {
            i++;
        }
    }
}

/* Execute `target` and what it needs, nothing else. */
static enum outcome run(struct sim_op *target) {
    size_t depth = 0;
    stack = sim__grow(stack, &stack_capacity, 1, sizeof *stack);
    stack[depth++] = target;
    while (depth) {
        struct sim_op *op = stack[depth - 1];
        if (op->executed) {
            depth--;
            continue;
        }
        struct sim_op *first = op->stream->exec_head;
        if (first->wait_exec) {
            struct sim_edge *edge = first->in;
            while (edge->executed || !edge->counted_exec)
                edge = edge->next_in;
            stack = sim__grow(stack, &stack_capacity, depth + 1, sizeof *stack);
            stack[depth++] = edge->from;
        } else if (first->stream->held) {
            return STUCK;
        } else if (first->kind == OP_HOSTFN) {
            return WAITS_FOR_HOST_FUNCTION;
        } else {
            if (first == op)
                depth--; /* it may be forgotten by executing it */
            execute(first);
        }
    }
    return RAN;
}

/* ---- virtual time ---- */

static void end_op(struct sim_op *op);

static enum sim_engine_kind engine_of(const struct sim_op *op) {
    return op->kind == OP_H2D ? ENGINE_H2D : op->kind == OP_D2H ? ENGINE_D2H : ENGINE_COMPUTE;
}

static unsigned engines_waiting; /* number of operations in engine queues */

static void engine_queue(struct sim_op *op) {
    struct sim_engine *engine = &sim.engines[op->stream->device][engine_of(op)];
    /* In the order they became ready; at one moment in the order of calls. */
    struct sim_op **at = &engine->first;
    if (engine->last && (engine->last->ready_s < op->ready_s || engine->last->seq < op->seq))
        at = &engine->last->next_waiting;
    else
        while (*at && ((*at)->ready_s < op->ready_s || (*at)->seq < op->seq))
            at = &(*at)->next_waiting;
    op->next_waiting = *at;
    *at = op;
    if (!op->next_waiting)
        engine->last = op;
    engines_waiting++;
}

/* Where the engine may begin an operation now; NULL while it is fully taken. */
static struct sim_op **free_place(struct sim_engine *engine, int kind) {
    const int wide = kind == ENGINE_COMPUTE && sim.switches[SIM_CONCURRENT_KERNELS];
    for (int i = 0; i < (wide ? SIM_AT_ONCE : 1); i++)
        if (!engine->busy[i])
            return &engine->busy[i];
    return NULL;
}

static int is_busy_with(const struct sim_engine *engine, const struct sim_op *op) {
    int found = 0;
    for (int i = 0; i < SIM_AT_ONCE; i++)
        found |= engine->busy[i] == op;
    return found;
}

/* When the upstream that devices share has passed on a copy that begins now, after all that was
 * given to it before: it ends no earlier, so together they get the upstream's rate at most, and one
 * that copies alone the rate of its own link. */
static double passed_upstream(const struct sim_op *op) {
    const struct sim_device *device = &sim.devices[op->stream->device];
    if (!is_copy(op) || !device->upstream)
        return clock_s;
    double *free_s = &sim.upstream_free_s[device->upstream][engine_of(op)];
    *free_s =
        (*free_s > clock_s ? *free_s : clock_s) + (double)op->bytes / (device->upstream_gbps * 1e9);
    return *free_s;
}

/* An operation begins now. */
static void begin_op(struct sim_op *op) {
    op->start_s = op->since_s = clock_s;
    op->left_s = op->cost_s;
    op->share = 1;
    op->passed_s = passed_upstream(op);
    op->end_s = clock_s + op->cost_s;
    if (op->end_s < op->passed_s)
        op->end_s = op->passed_s;
    heap_push(op->end_s, MOMENT_END, op);
}

/* A copy of a device has begun or ended, now. While both directions copy, each goes on at a share
 * of its rate; so the end of the other one moves. Ends are ahead of the clock, and so of the host:
 * the former one has not been reported. Its moment stays in the heap, and means nothing. */
static void share_link(int device) {
    const double both = sim.devices[device].duplex_share;
    struct sim_op *copies[] = {sim.engines[device][ENGINE_H2D].busy[0],
                               sim.engines[device][ENGINE_D2H].busy[0]};
    for (int i = 0; both < 1 && i < 2; i++) {
        struct sim_op *op = copies[i];
        const double share = copies[!i] ? both : 1;
        if (!op || !(op->share < share || op->share > share))
            continue;
        op->left_s -= (clock_s - op->since_s) * op->share;
        if (op->left_s < 0) /* the upstream holds it back */
            op->left_s = 0;
        op->since_s = clock_s;
        op->share = share;
        op->end_s = clock_s + op->left_s / share;
        if (op->end_s < op->passed_s)
            op->end_s = op->passed_s;
        sim__op_ref(op);
        op->former_ends++;
        heap_push(op->end_s, MOMENT_END, op);
    }
}

static int start_engines(void) {
    int started = 0;
    for (int device = 0; engines_waiting && device < sim.n_devices; device++) {
        for (int kind = 0; kind < ENGINE_COUNT; kind++) {
            struct sim_engine *engine = &sim.engines[device][kind];
            struct sim_op **place = free_place(engine, kind);
            if (!place || !engine->first)
                continue;
            struct sim_op *op = *place = engine->first;
            engine->first = op->next_waiting;
            if (!engine->first)
                engine->last = NULL;
            op->next_waiting = NULL;
            engines_waiting--;
            begin_op(op);
            if (kind != ENGINE_COMPUTE)
                share_link(device);
            started = 1;
        }
    }
    return started;
}

static void end_op(struct sim_op *op) {
    struct sim_stream *stream = op->stream;
    if (!is_marker(op) && op->kind != OP_HOSTFN) {
        struct sim_engine *engine = &sim.engines[stream->device][engine_of(op)];
        for (int i = 0; i < SIM_AT_ONCE; i++)
            if (engine->busy[i] == op)
                engine->busy[i] = NULL;
        if (is_copy(op))
            share_link(stream->device);
        double busy_s = op->end_s - op->start_s;
        if (op->kind == OP_H2D)
            sim.stats.h2d_busy_s += busy_s;
        else if (op->kind == OP_D2H)
            sim.stats.d2h_busy_s += busy_s;
        else
            sim.stats.compute_busy_s += busy_s;
    }
    sim__trace(op);
    op->ended = 1;
    if (op->next) {
        if (op->next->ready_s < op->end_s)
            op->next->ready_s = op->end_s;
        if (--op->next->wait_time == 0)
            time_ready(op->next);
    }
    for (struct sim_edge *edge = op->out; edge; edge = edge->next_out) {
        if (!edge->counted_time)
            continue;
        if (edge->to->ready_s < op->end_s)
            edge->to->ready_s = op->end_s;
        if (--edge->to->wait_time == 0)
            time_ready(edge->to);
    }
    if (by_time() && !op->executed) {
        op->due = 1;
        if (op->runnable_at && op->kind != OP_HOSTFN) {
            execute(op); /* forgets it, and perhaps its stream */
            return;
        }
    }
    unlink_done(op);
    retire(stream);
}

static void pass(const struct moment *moment) {
    struct sim_op *op = moment->op;
    if (moment->kind == MOMENT_END && (op->ended || moment->s < op->end_s)) {
        op->former_ends--; /* its end has moved: see share_link */
        sim__op_unref(op);
    } else if (moment->kind == MOMENT_END) {
        end_op(op);
    } else if (is_marker(op) || op->kind == OP_HOSTFN) {
        op->start_s = op->end_s = clock_s;
        end_op(op);
    } else {
        engine_queue(op);
    }
}

/* Let virtual time pass up to `limit_s`, or until `target` (if any) has ended. */
static void pass_until(double limit_s, const struct sim_op *target) {
    while (!target || !target->ended) {
        if (n_heap && heap[0].s <= clock_s) {
            struct moment moment = heap_pop();
            pass(&moment);
        } else if (start_engines()) {
            continue;
        } else if (n_heap && heap[0].s <= limit_s) {
            clock_s = heap[0].s;
        } else {
            break;
        }
    }
}

void sim__time_to(double seconds) {
    if (seconds > sim.now_s)
        sim.now_s = seconds;
    pass_until(sim.now_s, NULL);
    execute_due();
    settle();
    sim__readers_wake();
}

int sim__time_towards(double limit_s) {
    const double next_s = n_heap && heap[0].s < limit_s ? heap[0].s : limit_s;
    if (isinf(next_s))
        return 0;
    sim__time_to(next_s);
    return 1;
}

void sim__clock_reset(void) {
    sim.now_s = clock_s = 0;
    sim__disk_reset();
    memset(sim.upstream_free_s, 0, sizeof sim.upstream_free_s);
}

/* ---- the schedule's choices ---- */

static struct sim_op *random_runnable(void) {
    size_t candidates = 0;
    for (size_t i = 0; i < sim.n_runnable; i++)
        candidates += sim.runnable[i]->kind != OP_HOSTFN;
    if (!candidates)
        return NULL;
    size_t chosen = (size_t)(draw() % candidates);
    for (size_t i = 0;; i++)
        if (sim.runnable[i]->kind != OP_HOSTFN && chosen-- == 0)
            return sim.runnable[i];
}

static int eager_for(const struct sim_op *op) {
    if (op->kind == OP_HOSTFN)
        return 0;
    if (sim.schedule == SIM_STARVE_COPY)
        return !is_copy(op);
    if (sim.schedule == SIM_STARVE_COMPUTE)
        return is_copy(op) || is_marker(op);
    return sim.schedule == SIM_EAGER;
}

/* After a call: what the schedule runs although nothing waits for it. */
static void run_by_choice(void) {
    if (sim.schedule == SIM_RANDOM) {
        struct sim_op *op;
        while ((draw() & 3u) && (op = random_runnable()) != NULL)
            execute(op);
    } else if (!by_time()) {
        for (;;) {
            struct sim_op *oldest = NULL;
            for (size_t i = 0; i < sim.n_runnable; i++)
                if (eager_for(sim.runnable[i]) && (!oldest || sim.runnable[i]->seq < oldest->seq))
                    oldest = sim.runnable[i];
            if (!oldest)
                break;
            execute(oldest);
        }
    }
    settle();
}

/* ---- deadlock ---- */

static const char *op_text(enum sim_op_kind kind) {
    static const char *const names[] = {"H2D copy",      "D2H copy",     "kernel",    "memset",
                                        "host function", "event record", "event wait"};
    return names[kind];
}

static void report_deadlock(const struct sim_op *target) {
    char text[3000];
    size_t used = 0;
    for (const struct sim_stream *s = sim.streams; s && used < sizeof text - 400; s = s->next) {
        const struct sim_op *op = s->exec_head ? s->exec_head : s->head;
        if (!op)
            continue;
        int n = snprintf(text + used, sizeof text - used,
                         "  stream \"%s\": %" PRIu32 " queued, first a %s (call #%" PRIu64 ")",
                         sim.actors[s->actor].name, s->depth, op_text(op->kind), op->call);
        used += (size_t)n;
        const struct sim_edge *edge = op->in;
        while (edge && (edge->executed || !edge->from))
            edge = edge->next_in;
        if (s->held)
            n = snprintf(text + used, sizeof text - used, ", held by simHold\n");
        else if (edge)
            n = snprintf(text + used, sizeof text - used,
                         ", which waits for stream \"%s\" (the %s of call #%" PRIu64 ")\n",
                         sim.actors[edge->from->stream->actor].name, op_text(edge->from->kind),
                         edge->from->call);
        else if (op->kind == OP_HOSTFN)
            n = snprintf(text + used, sizeof text - used, ", which has not returned after %u ms\n",
                         sim.patience_ms);
        else
            n = snprintf(text + used, sizeof text - used, ", runnable\n");
        used += (size_t)n;
    }
    char seed[96];
    sim__seed_text(seed, sizeof seed);
    sim__report(0,
                "deadlock: call #%" PRIu64 " (%s) waits for the %s of call #%" PRIu64
                " on stream \"%s\", and nothing can run\n%s  schedule: %s",
                sim.call, sim__call_name(sim.current), op_text(target->kind), target->call,
                sim.actors[target->stream->actor].name, text, seed);
}

/* ---- waiting ---- */

/* Let the driver's thread finish a host function. STUCK after too long. */
static enum outcome wait_for_host_function(void) {
    uint64_t call = sim.call;
    enum sim_call current = sim.current;
    int late = sim_os_wait(&sim.changed, &sim.lock, sim.patience_ms);
    sim.call = call;
    sim.current = current;
    return late ? STUCK : WAITS_FOR_HOST_FUNCTION;
}

OOCUresult sim__wait(struct sim_op *op) {
    enum outcome outcome = RAN;
    sim__op_ref(op);
    sim__flush(op);
    if (by_time()) {
        pass_until(INFINITY, op);
        execute_due();
    }
    while (!op->executed && outcome != STUCK) {
        struct sim_op *other = sim.schedule == SIM_RANDOM ? random_runnable() : NULL;
        if (other) {
            execute(other);
            continue;
        }
        outcome = run(op);
        settle();
        if (outcome == WAITS_FOR_HOST_FUNCTION)
            outcome = wait_for_host_function();
    }
    settle();
    pass_until(INFINITY, op);
    if (op->ended)
        sim__time_to(op->end_s);
    else
        pass_until(sim.now_s = sim.now_s > clock_s ? sim.now_s : clock_s, NULL);
    OOCUresult result = OOCU_SUCCESS;
    if (!op->executed || !op->ended) {
        report_deadlock(op);
        result = OOCU_ERROR_UNKNOWN;
    }
    if (sim.sticky != OOCU_SUCCESS)
        result = sim.sticky;
    sim__op_unref(op);
    return result;
}

int sim__done(struct sim_op *op) {
    sim__op_ref(op);
    if (sim.schedule == SIM_RANDOM)
        run_by_choice();
    sim__time_to(sim.now_s);
    int done = op->executed && op->ended;
    if (!done && !by_time()) {
        /* Polling must end on every schedule: what should long be over is run now. */
        if (op->ended && !op->executed) {
            done = run(op) == RAN;
        } else if (op->executed) {
            pass_until(INFINITY, op);
            done = op->ended;
            if (done)
                sim__time_to(op->end_s);
        }
        settle();
    }
    sim__op_unref(op);
    return done;
}

OOCUresult sim__run_before(struct sim_stream *stream) {
    struct sim_op *op = stream->tail;
    if (!op)
        return OOCU_SUCCESS;
    enum outcome outcome = RAN;
    sim__op_ref(op);
    sim__flush(op);
    while (!op->executed && outcome != STUCK) {
        outcome = run(op);
        settle();
        if (outcome == WAITS_FOR_HOST_FUNCTION)
            outcome = wait_for_host_function();
    }
    if (!op->executed)
        report_deadlock(op);
    OOCUresult result = op->executed ? OOCU_SUCCESS : OOCU_ERROR_UNKNOWN;
    sim__op_unref(op);
    return result;
}

static int touches(const struct sim_op *op, uintptr_t lo, uintptr_t hi) {
    uintptr_t dst = (uintptr_t)op->dst, src = (uintptr_t)op->src;
    return (op->dst && dst < hi && dst + op->bytes > lo) ||
           (op->src && src < hi && src + op->bytes > lo);
}

static struct sim_op *queued_touching(uintptr_t lo, uintptr_t hi) {
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        for (struct sim_op *op = s->exec_head; op; op = op->next)
            if (!op->executed && touches(op, lo, hi))
                return op;
    return NULL;
}

void sim__run_touching(uintptr_t lo, uintptr_t hi) {
    struct sim_op *op;
    while ((op = queued_touching(lo, hi)) != NULL && run(op) == RAN)
        ; /* running one may forget others, and streams: search again */
    settle();
}

OOCUresult sim__wait_all(int device) {
    OOCUresult result = OOCU_SUCCESS;
    struct sim_stream *s = sim.streams;
    while (s && result == OOCU_SUCCESS) {
        if (s->device == device && s->tail) {
            /* Behind a host function that still runs all else may be discarded. */
            result = sim__wait(s->exec_head && s->tail->executed ? s->exec_head : s->tail);
            s = sim.streams; /* waiting may have freed streams */
        } else {
            s = s->next;
        }
    }
    return result;
}

static void forget_moments(void) {
    for (size_t i = 0; i < n_heap; i++) {
        struct sim_op *op = heap[i].op;
        if (op->former_ends) {
            op->former_ends--;
            sim__op_unref(op);
        }
    }
    n_heap = 0;
}

/* A dead context: nothing that is queued will ever run. */
void sim__discard_all(void) {
    while (n_fresh)
        sim__op_unref(fresh[--n_fresh]);
    forget_moments();
    engines_waiting = 0;
    memset(sim.engines, 0, sizeof sim.engines);
    for (struct sim_stream *s = sim.streams, *next; s; s = next) {
        next = s->next;
        for (struct sim_op *op = s->head; op; op = op->next) {
            if (!op->executed && !op->running) {
                not_runnable(op);
                if (op->kind == OP_HOSTFN)
                    n_host_functions--;
                op->executed = 1;
                sim.n_queued--;
            }
            if (!op->ended)
                op->start_s = op->end_s = clock_s;
            op->ended = 1;
            op->out = NULL;
            for (struct sim_edge *edge = op->in; edge; edge = edge->next_in) {
                edge->executed = 1;
                edge->from = NULL;
            }
            op->wait_exec = op->wait_time = 0;
        }
        /* A host function that runs comes to its end anyway. */
        if (!s->exec_head || !s->exec_head->running)
            s->exec_head = NULL;
        retire(s);
    }
    sim__readers_wake();
}

void sim__hold(struct sim_stream *stream, int on) {
    if (stream->held == !!on)
        return;
    stream->held = !!on;
    if (on) {
        if (stream->exec_head && !stream->exec_head->running)
            not_runnable(stream->exec_head);
        return;
    }
    if (stream->exec_head && !stream->exec_head->wait_exec)
        become_runnable(stream->exec_head);
    for (struct sim_op *op = stream->head; op; op = op->next) {
        if (op->ended)
            continue;
        int in_heap = 0;
        for (size_t i = 0; i < n_heap; i++)
            in_heap |= heap[i].op == op;
        if (!op->wait_time && !in_heap && !op->next_waiting &&
            sim.engines[stream->device][engine_of(op)].last != op &&
            !is_busy_with(&sim.engines[stream->device][engine_of(op)], op)) {
            if (op->ready_s < sim.now_s)
                op->ready_s = sim.now_s;
            time_ready(op);
        }
        break;
    }
    run_by_choice();
}

/* ---- host functions ---- */

static struct sim_op *oldest_host_function(void) {
    struct sim_op *oldest = NULL;
    for (struct sim_stream *s = sim.streams; s; s = s->next)
        for (struct sim_op *op = s->exec_head; op; op = op->next)
            if (op->kind == OP_HOSTFN && !op->executed && op->submitted) {
                if (!oldest || op->seq < oldest->seq)
                    oldest = op;
                break;
            }
    return oldest;
}

/* A host function must run even if no call waits for it: a program may wait for its signal alone.
 */
static sim_os_thread_result SIM_OS_THREAD driver_thread(void *unused) {
    (void)unused;
    sim_os_lock(&sim.lock);
    for (;;) {
        struct sim_op *op = n_host_functions ? oldest_host_function() : NULL;
        enum outcome outcome = STUCK;
        if (op) {
            /* Everything before it, then the function itself, outside the lock. Older host
             * functions are done, so what is before it is runnable unless a stream is held. */
            outcome = run(op);
            settle();
        }
        if (outcome != WAITS_FOR_HOST_FUNCTION || op->wait_exec || op->stream->exec_head != op) {
            sim_os_wait(&sim.changed, &sim.lock, 1000);
            continue;
        }
        op->running = 1;
        sim__op_ref(op);
        OOCUhostFn function = op->function;
        void *user_data = op->user_data;
        sim_os_unlock(&sim.lock);
        sim__set_in_host_function(1);
        function(user_data);
        sim__set_in_host_function(0);
        sim_os_lock(&sim.lock);
        op->running = 0;
        n_host_functions--;
        mark_executed(op);
        sim__op_unref(op);
        execute_due();
        run_by_choice();
        sim_os_broadcast(&sim.changed);
    }
    return 0; /* not reached */
}

/* ---- queueing ---- */

static struct sim_stream *legacy_of(int device) {
    return sim__handle_get(OBJECT_STREAM, sim.legacy[device]);
}

static void follow(struct sim_stream *stream, struct sim_op *op, const struct sim_stream *other) {
    if (op)
        sim__op_after(op, other->tail);
    sim__clock_join(&stream->clock, &other->clock);
}

/* The stream's next operation begins (`op`, or one that is not queued): its clock learns what comes
 * before. */
static void advance(struct sim_stream *stream, struct sim_op *op) {
    sim__clock_set(&stream->clock, stream->actor, ++sim.actors[stream->actor].epoch);
    sim__clock_join(&stream->clock, sim__host_clock());
    /* The legacy stream waits for all blocking streams of its device, and they for it. */
    if (stream->is_legacy) {
        sim__clock_join(&stream->clock, &sim.gone[stream->device]);
        for (struct sim_stream *s = sim.streams; s; s = s->next)
            if (s != stream && s->blocking && s->device == stream->device)
                follow(stream, op, s);
    } else if (stream->blocking) {
        struct sim_stream *legacy = legacy_of(stream->device);
        if (legacy)
            follow(stream, op, legacy);
    }
}

OOCUresult sim__op_new(struct sim_stream *stream, enum sim_op_kind kind, struct sim_op **out) {
    /* A hardware queue is bounded: the call that finds it full waits for the oldest operation. */
    while (stream->depth >= SIM_QUEUE_DEPTH) {
        OOCUresult result = sim__wait(stream->head);
        if (result != OOCU_SUCCESS)
            return result;
    }
    if (kind == OP_HOSTFN && !has_driver_thread) {
        if (sim_os_start(driver_thread))
            return OOCU_ERROR_OUT_OF_MEMORY;
        has_driver_thread = 1;
    }
    struct sim_op *op = spare_ops;
    if (op) {
        spare_ops = op->next;
    } else {
        op = malloc(sizeof *op);
        if (!op)
            return OOCU_ERROR_OUT_OF_MEMORY;
    }
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->refs = 1;
    op->seq = ++next_seq;
    op->call = sim.call;
    op->stream = stream;
    op->ready_s = sim.now_s;
    struct sim_op *last = stream->tail;
    if (last) {
        last->next = op;
        op->wait_exec += !last->executed;
        op->wait_time += !last->ended;
    } else {
        stream->head = op;
    }
    stream->tail = op;
    if (!stream->exec_head)
        stream->exec_head = op;
    stream->depth++;
    sim.n_queued++;

    advance(stream, op);
    *out = op;
    return OOCU_SUCCESS;
}

void sim__stream_writes(struct sim_stream *stream, enum sim_access_kind kind, uintptr_t lo,
                        uintptr_t hi) {
    advance(stream, NULL);
    sim__access(stream->actor, kind, 1, lo, hi);
}

void sim__op_after(struct sim_op *op, struct sim_op *from) {
    if (!from || (from->executed && from->ended))
        return;
    struct sim_edge *edge = spare_edges;
    if (edge) {
        spare_edges = edge->next_in;
    } else {
        edge = malloc(sizeof *edge);
        if (!edge)
            abort();
    }
    *edge = (struct sim_edge){.from = from,
                              .to = op,
                              .next_in = op->in,
                              .next_out = from->out,
                              .executed = from->executed,
                              .counted_exec = !from->executed,
                              .counted_time = !from->ended};
    op->in = edge;
    from->out = edge;
    op->wait_exec += !from->executed;
    op->wait_time += !from->ended;
}

static void hand_over(struct sim_op *op) {
    op->submitted = 1;
    if (op->ready_s < sim.now_s)
        op->ready_s = sim.now_s;
    if (!op->wait_time && !op->ended)
        time_ready(op);
    if (!op->wait_exec)
        become_runnable(op);
    if (op->kind == OP_HOSTFN)
        sim_os_broadcast(&sim.changed);
}

void sim__flush(struct sim_op *op) {
    if (op->submitted)
        return;
    for (struct sim_op *first = op->stream->head;; first = first->next) {
        if (!first->submitted) {
            for (struct sim_edge *edge = first->in; edge; edge = edge->next_in)
                if (edge->from)
                    sim__flush(edge->from);
            hand_over(first);
        }
        if (first == op)
            break;
    }
}

void sim__submit(struct sim_op *op) {
    /* One operation in four takes ten to a thousand times as long as it should. */
    if (sim.schedule == SIM_DELAYED && !(draw() & 3u)) {
        static const double factors[] = {10, 30, 100, 1000};
        op->cost_s *= factors[draw() & 3u];
    }
    n_host_functions += op->kind == OP_HOSTFN;
    if (!sim.switches[SIM_LATE_SUBMISSION])
        hand_over(op);
    run_by_choice();
}

/* ---- streams and events ---- */

struct sim_stream *sim__stream_new(int device, unsigned int flags, const char *name, int counted) {
    struct sim_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    stream->device = device;
    stream->blocking = !(flags & OOCU_STREAM_NON_BLOCKING);
    stream->counted = counted;
    stream->actor = sim__actor_new(&stream->clock, name);
    sim__clock_set(&stream->clock, stream->actor, sim.actors[stream->actor].epoch);
    stream->handle = sim__handle_new(OBJECT_STREAM, stream);
    stream->next = sim.streams;
    sim.streams = stream;
    if (counted)
        sim.live.streams++;
    return stream;
}

/* Returns at once with work pending, and drops none of it. */
void sim__stream_destroy(struct sim_stream *stream) {
    sim__handle_end(stream->handle);
    stream->destroyed = 1;
    if (stream->tail)
        sim__flush(stream->tail);
    if (stream->blocking && !stream->is_legacy)
        sim__clock_join(&sim.gone[stream->device], &stream->clock);
    if (stream->counted)
        sim.live.streams--;
    if (!stream->head)
        stream_free(stream);
}

static SIM_THREAD_LOCAL uint64_t per_thread[SIM_MAX_DEVICES];

struct sim_stream *sim__stream(OOCUstream handle) {
    uintptr_t value = (uintptr_t)handle;
    if (value > 2)
        return sim__handle_get(OBJECT_STREAM, value);
    int device = 0;
    if (sim__current_device(&device) != OOCU_SUCCESS)
        device = 0;
    uint64_t *slot = value == 2 ? &per_thread[device] : &sim.legacy[device];
    struct sim_stream *stream = *slot ? sim__handle_get(OBJECT_STREAM, *slot) : NULL;
    if (!stream) {
        stream = sim__stream_new(device, OOCU_STREAM_DEFAULT,
                                 value == 2 ? "per-thread default" : "legacy default", 0);
        if (!stream)
            return NULL;
        stream->is_legacy = value != 2;
        *slot = stream->handle;
    }
    return stream;
}

struct sim_event *sim__event(OOCUevent handle) {
    return sim__handle_get(OBJECT_EVENT, (uintptr_t)handle);
}
