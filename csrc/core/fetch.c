/* fetch.c - what is fetched next, where to, and what leaves for it. */
#include "planning.h"

/* What chose it: see planning.h. Units in the arena that are all looked at. Among few the
 * choice of sizes shows in the bytes; what looking costs is in the rows of `benchmarks/run.py
 * host_cost`. 50 changes no cell. */
enum { OO_FEW = 400 };

/* ---- what leaves ---- */

static uint64_t oo__evictable_next_use(const void *context, uint32_t unit) {
    const struct oo_plan *plan = context;
    return plan->units[unit].pins ? 0 : oo_plan_next_use(plan, unit);
}

/* Until training has found back, those that are settled are no room for a fetch: each would have
 * to come again. */
static uint64_t oo__fair_next_use(const void *context, uint32_t unit) {
    const struct oo_plan *plan = context;
    return plan->rounds.spread_over && oo__is_settled(plan, &plan->units[unit])
               ? 0
               : oo__evictable_next_use(plan, unit);
}

static void oo__furthest_learn(struct oo_plan *plan) {
    oo_furthest_clear(&plan->furthest);
    for (uint32_t unit = 0; unit < plan->n_units; unit++)
        if (plan->units[unit].block)
            oo_furthest_put(&plan->furthest, unit, oo__next_visit(plan, unit));
    plan->furthest_holds = 1;
}

static int oo__find(struct oo_plan *plan, uint32_t unit, uint64_t later_than,
                    struct oo_window *window) {
    struct oo_search search = {.bytes = plan->units[unit].bytes,
                               .later_than = later_than,
                               .next_use = later_than ? oo__fair_next_use : oo__evictable_next_use,
                               .context = plan,
                               .window = window};
    if (later_than == 0 || !oo__remembered(plan, plan->match))
        return oo_arena_find(&plan->arena, &search);
    if (oo_arena_find_free(&plan->arena, search.bytes, window))
        return 1;
    if (!plan->furthest_holds)
        oo__furthest_learn(plan);
    struct oo_furthest_walk walk;
    oo_furthest_begin(&plan->furthest, &walk);
    oo_search_begin(&search);
    const struct oo_far *far = oo_furthest_next(&plan->furthest, &walk);
    for (; far && far->use - plan->match > later_than;
         far = oo_furthest_next(&plan->furthest, &walk)) {
        if (plan->furthest.count <= OO_FEW)
            return oo_arena_find(&plan->arena, &search);
        struct oo_block *block = plan->units[far->unit].block;
        oo_search_at(&search, block);
        if (block->next && block->next->unit == OO_NO_UNIT)
            oo_search_at(&search, block->next);
    }
    /* Of more than OO_FURTHEST_STEPS units, a few were not looked at: they matter if all that was
     * found wastes some of the arena. */
    if (!far && walk.n_open && (!window->first || search.evicted > search.bytes))
        return oo_arena_find(&plan->arena, &search);
    return window->first != NULL;
}

/* ---- whether a place is free ---- */

/* Whether the unit's place on the tape is free for it. FREE: all units that are there are needed
 * later than the unit is needed `again`, so none of them has to come back during its stay, as in a
 * forward and a backward that mirror each other. FREE_SOON: that will be so once they have been
 * used, which is before the unit is used, `distance` visits from now. BUSY: one of them is needed
 * while the unit would be there (in sampling, where two units share a place, always). */
enum oo_tape_state { OO_TAPE_FREE, OO_TAPE_FREE_SOON, OO_TAPE_BUSY };

static enum oo_tape_state oo__tape_state(struct oo_plan *plan, uint32_t unit, uint64_t distance,
                                         uint64_t again, struct oo_window *window) {
    enum oo_tape_state answer = OO_TAPE_FREE;
    const size_t place = oo__tape_place(plan, unit);
    if (!oo_arena_window_at(&plan->arena, place, plan->units[unit].bytes, window))
        return OO_TAPE_BUSY;
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT && oo__evictable_next_use(plan, block->unit) <= again) {
            if (oo__next_use_after(plan, block->unit, distance) <= again)
                return OO_TAPE_BUSY;
            answer = OO_TAPE_FREE_SOON;
        }
        if (block == window->last)
            return answer;
    }
}

/* Whether all units in the unit's place are used later than that, so that none of them has to come
 * back before it is used. */
static int oo__place_is_free(struct oo_plan *plan, uint32_t unit, size_t place, uint64_t distance,
                             struct oo_window *window) {
    if (!oo_arena_window_at(&plan->arena, place, plan->units[unit].bytes, window))
        return 0;
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT && oo__evictable_next_use(plan, block->unit) <= distance)
            return 0;
        if (block == window->last)
            return 1;
    }
}

int oo_plan_place(struct oo_plan *plan, uint32_t unit, struct oo_window *window) {
    oo__ahead_reset(plan); /* what a demand evicts may be needed soon */
    if (oo__has_round_place(plan, unit) &&
        oo__place_is_free(plan, unit, oo__round_place(plan, unit), 0, window))
        return 1;
    const uint64_t again = oo_plan_next_use(plan, unit);
    return oo__tape_state(plan, unit, 0, again, window) == OO_TAPE_FREE ||
           oo__find(plan, unit, 0, window);
}

/* ---- what comes next ---- */

static int oo__wants_fetch(const struct oo_plan *plan, uint32_t unit, int tape) {
    const struct oo_plan_unit *u = &plan->units[unit];
    return !u->block && u->ahead && !u->removed && u->tape == tape;
}

/* Move the end over all that needs no fetch to this tape. */
static void oo__ahead_extend(struct oo_plan *plan, int tape) {
    struct oo_ahead *ahead = &plan->ahead[tape];
    if (ahead->end <= plan->match) {
        ahead->end = plan->match + 1;
        ahead->bytes = 0;
        ahead->head = ahead->tail = 0;
    }
    for (; ahead->end < plan->now &&
           !oo__wants_fetch(plan, oo__visit_at(plan, ahead->end)->unit, tape);
         ahead->end++) {
        const uint64_t next = oo__use_after(plan, ahead->end);
        while (ahead->head != ahead->tail &&
               ahead->queue[(ahead->tail - 1) & OO_TRACE_MASK].next <= next)
            ahead->tail--;
        ahead->queue[ahead->tail++ & OO_TRACE_MASK] = (struct oo_maximum){ahead->end, next};
        ahead->bytes += plan->units[oo__visit_at(plan, ahead->end)->unit].bytes;
    }
}

static void oo__ahead_pass_one(struct oo_plan *plan, struct oo_ahead *ahead) {
    if (ahead->end <= plan->match) {
        ahead->end = 0;
        return;
    }
    ahead->bytes -= plan->units[oo__visit_at(plan, plan->match)->unit].bytes;
    if (ahead->head != ahead->tail &&
        ahead->queue[ahead->head & OO_TRACE_MASK].visit == plan->match)
        ahead->head++;
}

void oo__ahead_pass(struct oo_plan *plan) {
    for (int i = 0; i < 2; i++)
        oo__ahead_pass_one(plan, &plan->ahead[i]);
}

/* How far ahead a fetch may be even if waiting would find a better place for it: so much as hides a
 * copy's latency. A quarter or a 64th of the arena instead of a 16th change no cell by 0.0002. */
static size_t oo__lead_bytes(const struct oo_plan *plan) { return plan->arena.total_bytes / 16; }

/* Visits from now to the first of the next round, beyond which nothing is fetched: training may
 * come instead. What is spread is not of use to it in any case. */
static uint64_t oo__to_next_round(const struct oo_plan *plan) {
    const uint64_t visits = oo__visit_at(plan, plan->now - 1)->forwards;
    const uint64_t length = plan->rounds.length;
    return plan->rounds.spread ? OO_NEVER : length - (visits - 1) % length;
}

static int oo__fetch_to(struct oo_plan *plan, const struct oo_ahead *ahead, uint32_t *unit,
                        struct oo_window *window) {
    if (ahead->end == plan->now)
        return 0;
    *unit = oo__visit_at(plan, ahead->end)->unit;
    uint64_t distance = ahead->end - plan->match;
    if (oo__has_round_place(plan, *unit) && oo__is_forward_at(plan, ahead->end))
        return distance <= oo__to_next_round(plan) &&
               oo__place_is_free(plan, *unit, oo__round_place(plan, *unit), distance, window);
    const size_t pile = oo__pile_place(plan, ahead->end);
    if (pile != OO_ANYWHERE)
        return oo__place_is_free(plan, *unit, pile, distance, window);
    uint64_t after = oo__use_after(plan, ahead->end);
    /* A unit that was spread or streamed may be in its place and be needed before those that have
     * been used.
     */
    if (plan->rounds.spread_over && !oo__is_forward_at(plan, ahead->end))
        after = oo__use_in_next_forward(plan, after);
    const uint64_t again = after - plan->match;
    const int early = ahead->bytes > oo__lead_bytes(plan);
    const enum oo_tape_state state = oo__tape_state(plan, *unit, distance, again, window);
    if (state == OO_TAPE_FREE)
        return 1;
    /* Elsewhere it would only take another unit's place, which then waits in its turn, in this step
     * and in all later ones. In a small arena there is little time to wait. */
    if (state == OO_TAPE_FREE_SOON && (early || !oo__is_small(plan)))
        return 0;
    /* Beyond the lead that hides a copy's latency, patience pays: a unit used between now and then
     * may be needed later than any that can be evicted now (in sampling it always is). */
    if (early && ahead->head != ahead->tail) {
        const uint64_t latest = ahead->queue[ahead->head & OO_TRACE_MASK].next - plan->match;
        if (latest > distance + 1)
            distance = latest - 1;
    }
    return oo__find(plan, *unit, distance, window);
}

/* Whether it has a place in a round: these come in order. */
static int oo__is_in_turn(const struct oo_plan *plan, const struct oo_ahead *ahead) {
    return ahead->end < plan->now && oo__is_forward_at(plan, ahead->end) &&
           oo__has_round_place(plan, oo__visit_at(plan, ahead->end)->unit);
}

/* Whether what is next on one tape may come before what is next on the other, which is used first:
 * that comes from elsewhere. */
static int oo__may_overtake(const struct oo_plan *plan) {
    int far[2] = {0, 1};
    for (int i = 0; i < 2; i++)
        if (plan->ahead[i].end < plan->now)
            far[i] = plan->units[oo__visit_at(plan, plan->ahead[i].end)->unit].far;
    return far[0] != far[1] && !oo__is_in_turn(plan, &plan->ahead[0]) &&
           !oo__is_in_turn(plan, &plan->ahead[1]);
}

static int oo__fetch_predicted(struct oo_plan *plan, int tapes, uint32_t *unit,
                               struct oo_window *window) {
    oo__learn_tape(plan);
    oo__ahead_extend(plan, 0);
    if (plan->parted)
        oo__ahead_extend(plan, 1);
    const int first = plan->parted && plan->ahead[1].end < plan->ahead[0].end;
    if ((tapes & 1 << first) && oo__fetch_to(plan, &plan->ahead[first], unit, window))
        return 1;
    return plan->parted && (tapes & 2 >> first) && oo__may_overtake(plan) &&
           oo__fetch_to(plan, &plan->ahead[!first], unit, window);
}

/* Before any match: the nearest absent unit in the direction of travel, of which a recompute has
 * none that lasts. */
static int oo__fetch_guessed(struct oo_plan *plan, uint32_t *unit, struct oo_window *window) {
    if (plan->now == 0 || oo__visit_at(plan, plan->now - 1)->kind == OO_RECOMPUTE)
        return 0;
    const struct oo_trace_entry *current = oo__visit_at(plan, plan->now - 1);
    const int descending = current->kind == OO_BACKWARD;
    uint32_t next = current->unit;
    do {
        if (descending ? next == 0 : next + 1 == plan->n_units)
            return 0;
        next = descending ? next - 1 : next + 1;
    } while (!oo__wants_fetch(plan, next, plan->units[next].tape));
    *unit = next;
    const uint64_t distance = oo__guess_next_use(plan, next);
    return oo__tape_state(plan, next, distance, distance, window) == OO_TAPE_FREE ||
           oo__find(plan, next, distance, window);
}

int oo_plan_tape(const struct oo_plan *plan, uint32_t unit) { return 1 << plan->units[unit].tape; }

int oo_plan_next_fetch(struct oo_plan *plan, int tapes, uint32_t *unit, struct oo_window *window) {
    return oo__remembered(plan, plan->match)
               ? oo__fetch_predicted(plan, tapes, unit, window)
               : tapes == OO_TAPES && oo__fetch_guessed(plan, unit, window);
}

int oo_plan_next_drop(struct oo_plan *plan, uint32_t *unit) {
    while (plan->misplaced < plan->n_units) {
        *unit = plan->misplaced++;
        if (oo__is_misplaced(plan, *unit))
            return 1;
    }
    return 0;
}

struct oo_block *oo_plan_take(struct oo_plan *plan, uint32_t unit, const struct oo_window *window) {
    /* Taking recycles the occupants' blocks: part them from their units first. */
    for (struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT) {
            plan->units[block->unit].block = NULL;
            oo_furthest_remove(&plan->furthest, block->unit);
        }
        if (block == window->last)
            break;
    }
    if (oo__has_round_place(plan, unit) && plan->units[unit].round_place == OO_IN_RING)
        plan->rounds.cursor = oo__round_place(plan, unit) + plan->units[unit].bytes;
    plan->units[unit].block = oo_arena_take(&plan->arena, window, plan->units[unit].bytes, unit);
    if (plan->furthest_holds)
        oo_furthest_put(&plan->furthest, unit, oo__next_visit(plan, unit));
    return plan->units[unit].block;
}

void oo_plan_drop(struct oo_plan *plan, uint32_t unit) {
    struct oo_block *block = plan->units[unit].block;
    if (!block)
        return;
    oo_arena_free(&plan->arena, block);
    plan->units[unit].block = NULL;
    oo_furthest_remove(&plan->furthest, unit);
    oo__ahead_reset(plan);
}
