/* race.c - what has touched which bytes, and what is ordered before what.
 *
 * Every stream and the host are actors with a vector clock. An operation is the actor's epoch at
 * the time of the call; it is ordered before a later one exactly if the later actor's clock has
 * reached that epoch. Clocks follow from the calls alone (queueing, records, waits,
 * synchronisation), never from what happens to run first, so a race is found on every schedule.
 *
 * History: disjoint byte intervals in a skip list; each holds the last write and the reads since
 * that are not ordered among themselves. Replacing an access by a later one that is ordered after
 * it loses no race: what is not ordered after the old one is not ordered after the new one either.
 * So the history is as large as the memory is fragmented, not as the program is long.
 */
#include "sim_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LEVELS = 12, FIRST_SWEEP = 4096, MAX_HOSTS = 256 };

struct access {
    uint64_t epoch; /* 0: none */
    uint64_t call;
    uintptr_t lo, hi; /* of the whole access, for reports */
    uint32_t actor;
    enum sim_call name;
    enum sim_access_kind kind;
    int is_write;
};

struct node {
    uintptr_t lo, hi;
    struct access write;
    struct access *reads;
    uint32_t n_reads, reads_capacity;
    int levels;
    struct node *next[MAX_LEVELS];
};

static struct node head = {.levels = MAX_LEVELS};
static struct node *spare;
static uint64_t n_nodes, sweep_at = FIRST_SWEEP;
static uint32_t n_free;
static uint64_t level_random = 0x9E3779B97F4A7C15u;

/* ---- clocks ---- */

static void widen(struct sim_clock *clock, uint32_t width) {
    if (clock->width >= width)
        return;
    uint32_t wider = (width + 7u) & ~7u;
    uint64_t *moved = realloc(clock->at, wider * sizeof *moved);
    if (!moved)
        abort();
    clock->at = moved;
    memset(clock->at + clock->width, 0, (wider - clock->width) * sizeof *clock->at);
    clock->width = wider;
}

uint64_t sim__clock_at(const struct sim_clock *clock, uint32_t actor) {
    return actor < clock->width ? clock->at[actor] : 0;
}

void sim__clock_set(struct sim_clock *clock, uint32_t actor, uint64_t epoch) {
    widen(clock, actor + 1);
    clock->at[actor] = epoch;
}

void sim__clock_join(struct sim_clock *clock, const struct sim_clock *other) {
    widen(clock, other->width);
    for (uint32_t i = 0; i < other->width; i++)
        if (other->at[i] > clock->at[i])
            clock->at[i] = other->at[i];
}

void sim__clock_assign(struct sim_clock *clock, const struct sim_clock *other) {
    widen(clock, other->width);
    if (other->width)
        memcpy(clock->at, other->at, other->width * sizeof *clock->at);
    if (clock->width > other->width)
        memset(clock->at + other->width, 0, (clock->width - other->width) * sizeof *clock->at);
}

void sim__clock_free(struct sim_clock *clock) {
    free(clock->at);
    clock->at = NULL;
    clock->width = 0;
}

/* ---- actors ---- */

/* Threads of the host share one clock unless SIM_STRICT_THREADS is on: the locks by which they take
 * turns (the GIL, an engine's mutex) cannot be seen from here, so telling them apart would call
 * correct programs racy. */
static SIM_THREAD_LOCAL uint32_t my_actor_plus_one;
static SIM_THREAD_LOCAL uint64_t my_generation;
static struct sim_clock *thread_clocks[MAX_HOSTS];
static uint32_t thread_actors[MAX_HOSTS];
static uint32_t n_threads;
static uint64_t generation = 1; /* of the thread clocks: simReset starts a new one */

uint32_t sim__actor_new(struct sim_clock *clock, const char *name) {
    uint32_t actor = 0;
    if (n_free > 0)
        while (actor < sim.n_actors && sim.actors[actor].state != SIM_ACTOR_FREE)
            actor++;
    else
        actor = sim.n_actors;
    if (actor == sim.n_actors) {
        sim.actors = sim__grow(sim.actors, &sim.actors_capacity, actor + 1, sizeof *sim.actors);
        memset(&sim.actors[actor], 0, sizeof sim.actors[actor]);
        sim.n_actors++;
    } else {
        n_free--;
    }
    struct sim_actor *a = &sim.actors[actor];
    a->state = SIM_ACTOR_LIVE;
    a->is_host = 0;
    a->clock = clock;
    snprintf(a->name, sizeof a->name, "%s", name);
    return actor;
}

static uint32_t host_actor(void) {
    if (!sim.host_actor_ready) {
        uint32_t actor = sim__actor_new(&sim.host_clock, "host");
        sim.actors[actor].is_host = 1;
        sim.host_actor_ready = 1;
        thread_actors[0] = actor;
        thread_clocks[0] = &sim.host_clock;
        n_threads = 1;
    }
    if (!sim.switches[SIM_STRICT_THREADS])
        return thread_actors[0];
    if (!my_actor_plus_one || my_generation != generation) {
        if (n_threads == MAX_HOSTS)
            return thread_actors[0];
        /* A new thread is ordered after what was done before it was first seen. */
        struct sim_clock *clock = calloc(1, sizeof *clock);
        if (!clock)
            abort();
        for (uint32_t i = 0; i < n_threads; i++)
            sim__clock_join(clock, thread_clocks[i]);
        char name[32];
        snprintf(name, sizeof name, "host thread %" PRIu32, n_threads);
        uint32_t actor = sim__actor_new(clock, name);
        sim.actors[actor].is_host = 1;
        thread_actors[n_threads] = actor;
        thread_clocks[n_threads] = clock;
        my_actor_plus_one = ++n_threads;
        my_generation = generation;
    }
    return thread_actors[my_actor_plus_one - 1];
}

struct sim_clock *sim__host_clock(void) {
    const uint32_t actor = host_actor(); /* may move sim.actors: must come first */
    return sim.actors[actor].clock;
}

void sim__host_knows_all(void) {
    (void)host_actor();
    for (uint32_t i = 0; i < n_threads; i++)
        for (uint32_t actor = 0; actor < sim.n_actors; actor++)
            if (!sim.actors[actor].is_host)
                sim__clock_set(thread_clocks[i], actor, sim.actors[actor].epoch);
}

/* ---- the skip list ---- */

/* before[l]: the last node of level l that begins below `lo`. */
static struct node *seek(uintptr_t lo, struct node *before[MAX_LEVELS]) {
    struct node *node = &head;
    for (int level = MAX_LEVELS - 1; level >= 0; level--) {
        while (node->next[level] && node->next[level]->lo < lo)
            node = node->next[level];
        before[level] = node;
    }
    return node->next[0];
}

/* The first node that ends above `lo`. */
static struct node *first_over(uintptr_t lo) {
    struct node *before[MAX_LEVELS];
    struct node *node = seek(lo, before);
    return before[0] != &head && before[0]->hi > lo ? before[0] : node;
}

static struct node *insert(uintptr_t lo, uintptr_t hi) {
    struct node *node = spare;
    if (node) {
        spare = node->next[0];
    } else {
        node = calloc(1, sizeof *node);
        if (!node)
            abort();
    }
    node->lo = lo;
    node->hi = hi;
    node->write.epoch = 0;
    node->n_reads = 0;
    level_random ^= level_random << 13;
    level_random ^= level_random >> 7;
    level_random ^= level_random << 17;
    node->levels = 1;
    for (uint64_t bits = level_random; node->levels < MAX_LEVELS && (bits & 3u) == 0; bits >>= 2)
        node->levels++;
    struct node *before[MAX_LEVELS];
    seek(lo, before);
    for (int level = 0; level < node->levels; level++) {
        node->next[level] = before[level]->next[level];
        before[level]->next[level] = node;
    }
    n_nodes++;
    return node;
}

static void drop(struct node *node) {
    struct node *before[MAX_LEVELS];
    seek(node->lo, before);
    for (int level = 0; level < node->levels; level++)
        before[level]->next[level] = node->next[level];
    node->next[0] = spare;
    spare = node;
    n_nodes--;
}

static void reserve_reads(struct node *node, uint32_t count) {
    if (count <= node->reads_capacity)
        return;
    uint32_t capacity = count < 4 ? 4 : 2 * count;
    struct access *moved = realloc(node->reads, capacity * sizeof *moved);
    if (!moved)
        abort();
    node->reads = moved;
    node->reads_capacity = capacity;
}

/* Cut `node` at `at`, which is inside it; returns the right part. */
static struct node *split(struct node *node, uintptr_t at) {
    struct node *right = insert(at, node->hi);
    node->hi = at;
    right->write = node->write;
    reserve_reads(right, node->n_reads);
    if (node->n_reads)
        memcpy(right->reads, node->reads, node->n_reads * sizeof *node->reads);
    right->n_reads = node->n_reads;
    return right;
}

/* ---- checking ---- */

static int ordered(const struct access *access, const struct sim_clock *clock) {
    return access->epoch <= sim__clock_at(clock, access->actor);
}

static const char *kind_text(enum sim_access_kind kind) {
    switch (kind) {
    case SIM_BY_H2D:
        return "host-to-device copy";
    case SIM_BY_D2H:
        return "device-to-host copy";
    case SIM_BY_KERNEL:
        return "kernel";
    case SIM_BY_MEMSET:
        return "memset";
    case SIM_BY_HOST:
        return "host access";
    case SIM_BY_LENDER:
        return "lender of the memory";
    }
    return "access";
}

static void describe(const struct access *a, const char *which, char *text, size_t capacity) {
    char range[160];
    sim__describe(a->lo, a->hi, range, sizeof range);
    const struct sim_actor *actor = &sim.actors[a->actor];
    snprintf(text, capacity, "  %s: %s by a %s, %s%s%s, call #%" PRIu64 " (%s), %s", which,
             a->is_write ? "write" : "read", kind_text(a->kind), actor->is_host ? "" : "stream \"",
             actor->name, actor->is_host ? "" : "\"", a->call, sim__call_name(a->name), range);
}

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0xFF51AFD7ED558CCDu;
    return hash ^ (hash >> 32);
}

static void report(const struct access *old, const struct access *now, uintptr_t lo, uintptr_t hi) {
    uint64_t key =
        mix(mix(mix(mix(1, old->actor), now->actor), (uint64_t)old->kind * 8 + now->kind),
            (uint64_t)old->is_write * 2 + (uint64_t)now->is_write);
    key = mix(mix(key, lo), hi);
    if (sim__reported(key))
        return;
    char first[400], second[400], range[160], edge[400], seed[96];
    describe(old, "earlier", first, sizeof first);
    describe(now, "later  ", second, sizeof second);
    sim__describe(lo, hi, range, sizeof range);
    const struct sim_actor *from = &sim.actors[old->actor];
    const struct sim_actor *to = &sim.actors[now->actor];
    if (to->is_host && from->is_host)
        snprintf(edge, sizeof edge, "%s and %s are not ordered by any call", from->name, to->name);
    else if (to->is_host)
        snprintf(edge, sizeof edge,
                 "before call #%" PRIu64
                 " the host waits for no event recorded on stream \"%s\" after "
                 "call #%" PRIu64,
                 now->call, from->name, old->call);
    else if (from->is_host)
        snprintf(edge, sizeof edge, "call #%" PRIu64 " came from a thread not ordered after %s",
                 now->call, from->name);
    else
        snprintf(edge, sizeof edge,
                 "before call #%" PRIu64
                 " stream \"%s\" waits for no event recorded on stream \"%s\" "
                 "after call #%" PRIu64,
                 now->call, to->name, from->name, old->call);
    sim__seed_text(seed, sizeof seed);
    sim__report(key, "race: %s-after-%s on %s\n%s\n%s\n  missing edge: %s\n  schedule: %s",
                now->is_write ? "write" : "read", old->is_write ? "write" : "read", range, first,
                second, edge, seed);
}

/* What every live actor is ordered after. Later operations of a stream are also ordered after what
 * the host knows when it queues them. */
static void common_past(struct sim_clock *past) {
    int first = 1;
    struct sim_clock one = {0};
    for (uint32_t i = 0; i < sim.n_actors; i++) {
        if (sim.actors[i].state != SIM_ACTOR_LIVE)
            continue;
        sim__clock_assign(&one, sim.actors[i].clock);
        if (!sim.switches[SIM_STRICT_THREADS])
            sim__clock_join(&one, &sim.host_clock);
        if (first)
            sim__clock_assign(past, &one);
        else
            for (uint32_t k = 0; k < past->width; k++)
                if (past->at[k] > sim__clock_at(&one, k))
                    past->at[k] = sim__clock_at(&one, k);
        first = 0;
    }
    sim__clock_free(&one);
}

static int same_access(const struct access *a, const struct access *b) {
    return a->epoch == b->epoch && (!a->epoch || a->actor == b->actor);
}

/* Whether two intervals have the same history, so that one can replace both. */
static int same_history(const struct node *a, const struct node *b) {
    if (!same_access(&a->write, &b->write) || a->n_reads != b->n_reads)
        return 0;
    for (uint32_t i = 0; i < a->n_reads; i++) {
        uint32_t k = 0;
        while (k < b->n_reads && !same_access(&a->reads[i], &b->reads[k]))
            k++;
        if (k == b->n_reads)
            return 0;
    }
    return 1;
}

static void sweep(void) {
    struct sim_clock past = {0};
    struct node *previous = NULL;
    common_past(&past);
    for (struct node *node = head.next[0], *next; node; node = next) {
        next = node->next[0];
        if (node->write.epoch && ordered(&node->write, &past))
            node->write.epoch = 0;
        uint32_t kept = 0;
        for (uint32_t i = 0; i < node->n_reads; i++)
            if (!ordered(&node->reads[i], &past))
                node->reads[kept++] = node->reads[i];
        node->n_reads = kept;
        if (!node->write.epoch && !kept) {
            drop(node);
        } else if (previous && previous->hi == node->lo && same_history(previous, node)) {
            previous->hi = node->hi;
            drop(node);
        } else {
            previous = node;
        }
    }
    for (uint32_t i = 0; i < sim.n_actors; i++) {
        struct sim_actor *actor = &sim.actors[i];
        if (actor->state == SIM_ACTOR_GONE && actor->epoch <= sim__clock_at(&past, i)) {
            actor->state = SIM_ACTOR_FREE;
            n_free++;
        }
    }
    sim__clock_free(&past);
    sweep_at = 2 * n_nodes + FIRST_SWEEP;
}

void sim__actor_gone(uint32_t actor) {
    static uint32_t since_sweep;
    sim.actors[actor].state = SIM_ACTOR_GONE;
    sim.actors[actor].clock = NULL;
    if (++since_sweep >= 64) {
        since_sweep = 0;
        sweep();
    }
}

static int same_reader(const struct access *a, const struct access *b) {
    return a->actor == b->actor;
}

static void add_read(struct node *node, const struct access *now, const struct sim_clock *clock) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < node->n_reads; i++)
        if (!same_reader(&node->reads[i], now) && !ordered(&node->reads[i], clock))
            node->reads[kept++] = node->reads[i];
    reserve_reads(node, kept + 1);
    node->reads[kept] = *now;
    node->n_reads = kept + 1;
}

static void check(const struct access *now, const struct sim_clock *clock) {
    for (struct node *node = first_over(now->lo); node && node->lo < now->hi;
         node = node->next[0]) {
        uintptr_t lo = node->lo > now->lo ? node->lo : now->lo;
        uintptr_t hi = node->hi < now->hi ? node->hi : now->hi;
        if (node->write.epoch && !ordered(&node->write, clock))
            report(&node->write, now, lo, hi);
        for (uint32_t i = 0; now->is_write && i < node->n_reads; i++)
            if (!ordered(&node->reads[i], clock))
                report(&node->reads[i], now, lo, hi);
    }
}

void sim__access_forget(uintptr_t lo, uintptr_t hi) {
    struct node *node = first_over(lo);
    if (node && node->lo < lo && node->hi > lo)
        node = split(node, lo);
    while (node && node->lo < hi) {
        if (node->hi > hi)
            split(node, hi);
        struct node *next = node->next[0];
        drop(node);
        node = next;
    }
}

static void remember_write(const struct access *now) {
    struct node *node = first_over(now->lo);
    if (!node || node->lo != now->lo || node->hi != now->hi) {
        sim__access_forget(now->lo, now->hi);
        node = insert(now->lo, now->hi);
    }
    node->write = *now;
    node->n_reads = 0;
}

static void remember_read(const struct access *now, const struct sim_clock *clock) {
    struct node *node = first_over(now->lo);
    if (node && node->lo < now->lo)
        node = split(node, now->lo);
    uintptr_t at = now->lo;
    while (at < now->hi) {
        if (!node || node->lo >= now->hi) {
            node = insert(at, now->hi);
        } else if (node->lo > at) {
            node = insert(at, node->lo);
        } else if (node->hi > now->hi) {
            split(node, now->hi);
        }
        add_read(node, now, clock);
        at = node->hi;
        node = node->next[0];
    }
}

void sim__access(uint32_t actor, enum sim_access_kind kind, int is_write, uintptr_t lo,
                 uintptr_t hi) {
    if (!sim.switches[SIM_RACES] || lo >= hi)
        return;
    const struct sim_clock *clock = sim.actors[actor].clock;
    struct access now = {.epoch = sim.actors[actor].epoch,
                         .call = sim.call,
                         .lo = lo,
                         .hi = hi,
                         .actor = actor,
                         .name = sim.current,
                         .kind = kind,
                         .is_write = is_write};
    check(&now, clock);
    /* While all host threads share a clock, everything later is ordered after the host's accesses:
     * a write of the host ends the history of these bytes, a read adds nothing to it. */
    if (sim.actors[actor].is_host && !sim.switches[SIM_STRICT_THREADS]) {
        if (is_write)
            sim__access_forget(lo, hi);
    } else if (is_write) {
        remember_write(&now);
    } else {
        remember_read(&now, clock);
    }
    if (n_nodes > sweep_at)
        sweep();
}

void sim__host_access(enum sim_access_kind kind, int is_write, uintptr_t lo, uintptr_t hi) {
    uint32_t actor = host_actor();
    sim__clock_set(sim.actors[actor].clock, actor, ++sim.actors[actor].epoch);
    sim__access(actor, kind, is_write, lo, hi);
}

uint64_t sim__race_nodes(void) { return n_nodes; }

void sim__race_reset(void) {
    sim__access_forget(0, UINTPTR_MAX);
    for (uint32_t i = 1; i < n_threads; i++) {
        sim.actors[thread_actors[i]].state = SIM_ACTOR_GONE;
        sim.actors[thread_actors[i]].clock = NULL;
        sim__clock_free(thread_clocks[i]);
        free(thread_clocks[i]);
    }
    if (n_threads > 1)
        n_threads = 1;
    generation++;
    sweep();
    sweep_at = FIRST_SWEEP;
}
