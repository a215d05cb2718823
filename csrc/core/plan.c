/* plan.c - prediction, Belady's rule, placement; see plan.h. */
#include "plan.h"

#include "status.h"

#include <stdlib.h>
#include <string.h>

/* Visits remembered. A step of a model with 1,000 units is 3,000 visits; the match needs one
 * earlier period and the current one. */
enum { OO_TRACE_BITS = 16, OO_TRACE = 1 << OO_TRACE_BITS, OO_TRACE_MASK = OO_TRACE - 1 };
enum { OO_CANDIDATES = 32, OO_CONTEXT = 256 }; /* bounds of one search for a match */
#define OO_NOWHERE UINT64_MAX                  /* an index into the trace that is none */

struct oo_visit {
    uint32_t unit;
    enum oo_kind kind;
    uint64_t previous, next; /* indices of this unit's visits before and after, or OO_NOWHERE */
};

/* The predicted visits (match, end) that need no fetch: their bytes, and as a queue of falling
 * maxima when their units are used again. */
struct oo_ahead {
    uint64_t end;
    size_t bytes;
    uint64_t head, tail; /* queue[head..tail) modulo OO_TRACE */
    struct oo_maximum {
        uint64_t visit, next;
    } *queue;
};

struct oo_plan_unit {
    size_t bytes;
    struct oo_block *block;
    uint64_t last;    /* index of its latest visit */
    uint64_t counted; /* scratch of oo__learn_block: the visit it was counted for */
    uint32_t pins;
    uint8_t ahead, removed;
};

struct oo_plan {
    struct oo_arena arena;
    struct oo_plan_unit *units;
    uint32_t n_units, capacity;
    struct oo_visit *trace; /* ring: visit i at i & OO_TRACE_MASK */
    uint64_t now;           /* visits so far; the current one is now - 1 */
    uint64_t match;         /* an earlier visit after which the future is expected to repeat */
    struct oo_ahead ahead;
    uint64_t longest_block; /* in visits: shorter ones need no counting */
    size_t block_bytes;
    uint64_t allocations;
};

enum oo_status oo_plan_create(struct oo_plan **out) {
    struct oo_plan *plan = calloc(1, sizeof *plan);
    *out = plan;
    if (plan) {
        plan->trace = calloc(OO_TRACE, sizeof *plan->trace);
        plan->ahead.queue = calloc(OO_TRACE, sizeof *plan->ahead.queue);
    }
    if (!plan || !plan->trace || !plan->ahead.queue) {
        oo_plan_destroy(plan);
        *out = NULL;
        return oo__fail(OO_E_MEMORY, "no memory for the trace of visits");
    }
    plan->match = OO_NOWHERE;
    return OO_OK;
}

void oo_plan_destroy(struct oo_plan *plan) {
    if (!plan)
        return;
    oo_arena_clear(&plan->arena);
    free(plan->trace);
    free(plan->ahead.queue);
    free(plan->units);
    free(plan);
}

struct oo_arena *oo_plan_arena(struct oo_plan *plan) { return &plan->arena; }
uint64_t oo_plan_allocations(const struct oo_plan *plan) {
    return plan->allocations + plan->arena.allocations;
}

enum oo_status oo_plan_unit_add(struct oo_plan *plan, size_t bytes, uint32_t *unit) {
    if (plan->n_units == plan->capacity) {
        const uint32_t capacity = plan->capacity ? 2 * plan->capacity : 256;
        struct oo_plan_unit *units = realloc(plan->units, capacity * sizeof *units);
        if (!units)
            return oo__fail(OO_E_MEMORY, "no memory for %u units", capacity);
        plan->units = units;
        plan->capacity = capacity;
        plan->allocations++;
    }
    if (!oo_arena_reserve(&plan->arena))
        return oo__fail(OO_E_MEMORY, "no memory for a unit's place in the arena");
    plan->units[plan->n_units] = (struct oo_plan_unit){
        .bytes = bytes, .last = OO_NOWHERE, .counted = OO_NOWHERE, .ahead = 1};
    *unit = plan->n_units++;
    return OO_OK;
}

void oo_plan_unit_remove(struct oo_plan *plan, uint32_t unit) { plan->units[unit].removed = 1; }

static void oo__ahead_reset(struct oo_plan *plan) { plan->ahead.end = 0; }

void oo_plan_allow(struct oo_plan *plan, uint32_t unit, int ahead) {
    if (ahead && !plan->units[unit].ahead)
        oo__ahead_reset(plan); /* it may have been passed over */
    plan->units[unit].ahead = ahead != 0;
}

void oo_plan_pin(struct oo_plan *plan, uint32_t unit) { plan->units[unit].pins++; }
void oo_plan_unpin(struct oo_plan *plan, uint32_t unit) { plan->units[unit].pins--; }
uint32_t oo_plan_pins(const struct oo_plan *plan, uint32_t unit) { return plan->units[unit].pins; }
size_t oo_plan_block_bytes(const struct oo_plan *plan) { return plan->block_bytes; }
struct oo_block *oo_plan_resident(const struct oo_plan *plan, uint32_t unit) {
    return plan->units[unit].block;
}

/* ---- the trace and the match ---- */

static const struct oo_visit *oo__visit_at(const struct oo_plan *plan, uint64_t index) {
    return &plan->trace[index & OO_TRACE_MASK];
}

static int oo__remembered(const struct oo_plan *plan, uint64_t index) {
    return index != OO_NOWHERE && index + OO_TRACE > plan->now;
}

static int oo__same_visit(const struct oo_plan *plan, uint64_t a, uint64_t b) {
    return oo__visit_at(plan, a)->unit == oo__visit_at(plan, b)->unit &&
           oo__visit_at(plan, a)->kind == oo__visit_at(plan, b)->kind;
}

/* Among earlier visits like the current one, the one preceded by the longest equal past; of equals
 * the latest, so that the period is the shortest that explains what was seen. */
static uint64_t oo__find_match(const struct oo_plan *plan) {
    const uint64_t current = plan->now - 1;
    uint64_t best = OO_NOWHERE;
    uint64_t best_length = 0;
    uint64_t candidate = oo__visit_at(plan, current)->previous;
    for (int tried = 0; tried < OO_CANDIDATES && oo__remembered(plan, candidate);
         candidate = oo__visit_at(plan, candidate)->previous) {
        if (!oo__same_visit(plan, candidate, current))
            continue;
        tried++;
        uint64_t length = 1;
        while (length < OO_CONTEXT && length <= candidate &&
               oo__remembered(plan, candidate - length) &&
               oo__same_visit(plan, candidate - length, current - length))
            length++;
        if (length > best_length) {
            best_length = length;
            best = candidate;
        }
    }
    return best;
}

/* A unit's backward follows its recompute within one checkpointed block: the distinct bytes used in
 * between are what the arena must hold for recompute and backward to share one stay. */
static void oo__learn_block(struct oo_plan *plan) {
    const uint64_t current = plan->now - 1;
    uint64_t begin = oo__visit_at(plan, current)->previous;
    while (oo__remembered(plan, begin) && oo__visit_at(plan, begin)->kind == OO_BACKWARD)
        begin = oo__visit_at(plan, begin)->previous;
    if (!oo__remembered(plan, begin) || oo__visit_at(plan, begin)->kind != OO_RECOMPUTE)
        return;
    if (current - begin <= plan->longest_block)
        return;
    size_t bytes = 0;
    for (uint64_t i = begin; i < current; i++) {
        struct oo_plan_unit *between = &plan->units[oo__visit_at(plan, i)->unit];
        if (oo__visit_at(plan, i)->kind == OO_FORWARD)
            return; /* another step lies between: not one block */
        if (between->counted != current) {
            between->counted = current;
            bytes += between->bytes;
        }
    }
    plan->longest_block = current - begin;
    if (bytes > plan->block_bytes)
        plan->block_bytes = bytes;
}

/* The visit at the match was made: it lies ahead no more. */
static void oo__ahead_pass(struct oo_plan *plan) {
    struct oo_ahead *ahead = &plan->ahead;
    if (ahead->end <= plan->match) {
        oo__ahead_reset(plan);
        return;
    }
    ahead->bytes -= plan->units[oo__visit_at(plan, plan->match)->unit].bytes;
    if (ahead->head != ahead->tail &&
        ahead->queue[ahead->head & OO_TRACE_MASK].visit == plan->match)
        ahead->head++;
}

void oo_plan_visit(struct oo_plan *plan, uint32_t unit, enum oo_kind kind) {
    const uint64_t previous = plan->units[unit].last;
    plan->trace[plan->now & OO_TRACE_MASK] = (struct oo_visit){unit, kind, previous, OO_NOWHERE};
    if (previous != OO_NOWHERE && oo__remembered(plan, previous))
        plan->trace[previous & OO_TRACE_MASK].next = plan->now;
    plan->units[unit].last = plan->now++;
    /* The prediction held if the visit after the match is this one. */
    if (oo__remembered(plan, plan->match) && plan->match + 1 < plan->now - 1 &&
        oo__same_visit(plan, plan->match + 1, plan->now - 1)) {
        plan->match++;
        oo__ahead_pass(plan);
    } else {
        plan->match = oo__find_match(plan);
        oo__ahead_reset(plan);
    }
    if (kind == OO_BACKWARD)
        oo__learn_block(plan);
}

/* Nothing to go by yet: forward in order of creation, backward against it; a recompute stays near.
 */
static uint64_t oo__guess_next_use(const struct oo_plan *plan, uint32_t unit) {
    if (plan->now == 0)
        return (uint64_t)unit + 1;
    const struct oo_visit *current = oo__visit_at(plan, plan->now - 1);
    const uint64_t distance = unit > current->unit ? unit - current->unit : current->unit - unit;
    const int lies_ahead =
        current->kind == OO_RECOMPUTE || (current->kind == OO_BACKWARD) == (unit < current->unit);
    return lies_ahead ? distance : 2 * (uint64_t)plan->n_units - distance;
}

uint64_t oo_plan_next_use(const struct oo_plan *plan, uint32_t unit) {
    if (!oo__remembered(plan, plan->match))
        return oo__guess_next_use(plan, unit);
    uint64_t next = OO_NOWHERE;
    for (uint64_t i = plan->units[unit].last; oo__remembered(plan, i) && i > plan->match;
         i = oo__visit_at(plan, i)->previous)
        next = i;
    return next == OO_NOWHERE ? OO_NEVER : next - plan->match;
}

/* ---- decisions ---- */

static uint64_t oo__evictable_next_use(const void *context, uint32_t unit) {
    const struct oo_plan *plan = context;
    return plan->units[unit].pins ? 0 : oo_plan_next_use(plan, unit);
}

int oo_plan_place(struct oo_plan *plan, uint32_t unit, struct oo_window *window) {
    oo__ahead_reset(plan); /* what a demand evicts may be needed soon */
    return oo_arena_find(&plan->arena, plan->units[unit].bytes, 0, oo__evictable_next_use, plan,
                         window);
}

static int oo__wants_fetch(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_plan_unit *u = &plan->units[unit];
    return !u->block && u->ahead && !u->removed;
}

/* When the unit of predicted visit `index` is used after that. */
static uint64_t oo__use_after(const struct oo_plan *plan, uint64_t index) {
    const struct oo_visit *visit = oo__visit_at(plan, index);
    if (visit->next != OO_NOWHERE)
        return visit->next;
    return plan->match + oo_plan_next_use(plan, visit->unit) +
           (plan->now - 1 - plan->match); /* a period later */
}

/* Move the end over all that needs no fetch. */
static void oo__ahead_extend(struct oo_plan *plan) {
    struct oo_ahead *ahead = &plan->ahead;
    if (ahead->end <= plan->match) {
        ahead->end = plan->match + 1;
        ahead->bytes = 0;
        ahead->head = ahead->tail = 0;
    }
    for (; ahead->end < plan->now && !oo__wants_fetch(plan, oo__visit_at(plan, ahead->end)->unit);
         ahead->end++) {
        const uint64_t next = oo__use_after(plan, ahead->end);
        while (ahead->head != ahead->tail &&
               ahead->queue[(ahead->tail - 1) & OO_TRACE_MASK].next <= next)
            ahead->tail--;
        ahead->queue[ahead->tail++ & OO_TRACE_MASK] = (struct oo_maximum){ahead->end, next};
        ahead->bytes += plan->units[oo__visit_at(plan, ahead->end)->unit].bytes;
    }
}

/* How far ahead a fetch may be even if waiting would find a better place for it. */
static size_t oo__lead_bytes(const struct oo_plan *plan) { return plan->arena.total_bytes / 16; }

int oo_plan_next_fetch(struct oo_plan *plan, uint32_t *unit, struct oo_window *window) {
    uint64_t distance;
    if (oo__remembered(plan, plan->match)) {
        oo__ahead_extend(plan);
        const struct oo_ahead *ahead = &plan->ahead;
        if (ahead->end == plan->now)
            return 0;
        *unit = oo__visit_at(plan, ahead->end)->unit;
        distance = ahead->end - plan->match;
        /* Beyond the lead that hides a copy's latency, patience pays: a unit used between now and
         * then may be needed later than any that can be evicted now (in sampling it always is). */
        if (ahead->bytes > oo__lead_bytes(plan) && ahead->head != ahead->tail) {
            const uint64_t latest = ahead->queue[ahead->head & OO_TRACE_MASK].next - plan->match;
            if (latest > distance + 1)
                distance = latest - 1;
        }
    } else {
        /* Before any match: the nearest absent unit in the direction of travel, of which a
         * recompute has none that lasts. */
        if (plan->now == 0 || oo__visit_at(plan, plan->now - 1)->kind == OO_RECOMPUTE)
            return 0;
        const struct oo_visit *current = oo__visit_at(plan, plan->now - 1);
        const int descending = current->kind == OO_BACKWARD;
        uint32_t next = current->unit;
        do {
            if (descending ? next == 0 : next + 1 == plan->n_units)
                return 0;
            next = descending ? next - 1 : next + 1;
        } while (!oo__wants_fetch(plan, next));
        *unit = next;
        distance = oo__guess_next_use(plan, next);
    }
    return oo_arena_find(&plan->arena, plan->units[*unit].bytes, distance, oo__evictable_next_use,
                         plan, window);
}

struct oo_block *oo_plan_take(struct oo_plan *plan, uint32_t unit, const struct oo_window *window) {
    /* Taking recycles the occupants' blocks: part them from their units first. */
    for (struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT)
            plan->units[block->unit].block = NULL;
        if (block == window->last)
            break;
    }
    plan->units[unit].block = oo_arena_take(&plan->arena, window, plan->units[unit].bytes, unit);
    return plan->units[unit].block;
}

void oo_plan_drop(struct oo_plan *plan, uint32_t unit) {
    struct oo_block *block = plan->units[unit].block;
    if (!block)
        return;
    oo_arena_free(&plan->arena, block);
    plan->units[unit].block = NULL;
    oo__ahead_reset(plan);
}
