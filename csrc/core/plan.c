/* plan.c - a use of a unit, and what it says of the next ones; see plan.h and planning.h. */
#include "plan.h"

#include "../base/status.h"
#include "planning.h"

#include <stdlib.h>

enum oo_status oo_plan_create(struct oo_plan **out) {
    struct oo_plan *plan = calloc(1, sizeof *plan);
    *out = plan;
    if (plan) {
        plan->trace = calloc(OO_TRACE, sizeof *plan->trace);
        for (int i = 0; i < 2; i++)
            plan->ahead[i].queue = calloc(OO_TRACE, sizeof *plan->ahead[i].queue);
    }
    if (!plan || !plan->trace || !plan->ahead[0].queue || !plan->ahead[1].queue) {
        oo_plan_destroy(plan);
        *out = NULL;
        return oo__fail(OO_E_MEMORY, "no memory for the trace of visits");
    }
    plan->match = OO_NOWHERE;
    plan->misplaced = UINT32_MAX;
    plan->pile_layout = OO_NOWHERE;
    return OO_OK;
}

void oo_plan_destroy(struct oo_plan *plan) {
    if (!plan)
        return;
    oo_arena_clear(&plan->arena);
    free(plan->trace);
    for (int i = 0; i < 2; i++)
        free(plan->ahead[i].queue);
    free(plan->units);
    free(plan->tape);
    free(plan->turns);
    oo_furthest_free(&plan->furthest);
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
        plan->units = units ? units : plan->units;
        uint32_t *tape = realloc(plan->tape, capacity * sizeof *tape);
        plan->tape = tape ? tape : plan->tape;
        struct oo_turn *turns = realloc(plan->turns, capacity * sizeof *turns);
        plan->turns = turns ? turns : plan->turns;
        if (!units || !tape || !turns || !oo_furthest_reserve(&plan->furthest, capacity))
            return oo__fail(OO_E_MEMORY, "no memory for %u units", capacity);
        plan->capacity = capacity;
        plan->allocations += 5;
    }
    if (!oo_arena_reserve(&plan->arena))
        return oo__fail(OO_E_MEMORY, "no memory for a unit's place in the arena");
    plan->units[plan->n_units] = (struct oo_plan_unit){
        .bytes = bytes, .last = OO_NOWHERE, .pile_place = OO_ANYWHERE, .ahead = 1};
    plan->units_bytes += bytes;
    *unit = plan->n_units++;
    return OO_OK;
}

void oo_plan_unit_remove(struct oo_plan *plan, uint32_t unit) {
    struct oo_plan_unit *u = &plan->units[unit];
    u->seconds = 0;
    u->removed = 1;
    plan->units_bytes -= u->bytes;
    plan->tape_layout = OO_NOWHERE; /* its place goes to others */
}

void oo_plan_allow(struct oo_plan *plan, uint32_t unit, int ahead) {
    if (plan->units[unit].ahead == ahead)
        return;
    plan->units[unit].ahead = ahead != 0;
    oo__ahead_reset(plan); /* it may have been passed over */
}

void oo_plan_far(struct oo_plan *plan, uint32_t unit, int far) {
    if (plan->units[unit].far == far)
        return;
    plan->units[unit].far = far != 0;
    plan->tape_layout = OO_NOWHERE;
    plan->rounds.layout = OO_NOWHERE; /* others shall stay */
}

void oo_plan_pin(struct oo_plan *plan, uint32_t unit) {
    struct oo_plan_unit *u = &plan->units[unit];
    if (!u->pins++)
        u->since = plan->now;
}

void oo_plan_unpin(struct oo_plan *plan, uint32_t unit) {
    struct oo_plan_unit *u = &plan->units[unit];
    if (--u->pins || u->stays || plan->now - u->since <= plan->n_units / 2)
        return;
    u->stays = 1;
    plan->tape_layout = OO_NOWHERE; /* the places of others keep clear of it */
    plan->relaid = 1;
}

uint32_t oo_plan_pins(const struct oo_plan *plan, uint32_t unit) { return plan->units[unit].pins; }

size_t oo_plan_block_bytes(const struct oo_plan *plan) { return plan->block_bytes; }

struct oo_block *oo_plan_resident(const struct oo_plan *plan, uint32_t unit) {
    return plan->units[unit].block;
}

/* The current visit repeats the one at `match`; as was expected, where that holds. */
static void oo__follow(struct oo_plan *plan, uint64_t match, int holds) {
    const uint32_t unit = oo__visit_at(plan, plan->now - 1)->unit;
    plan->match = match;
    if (holds) {
        plan->confirmed++;
        oo__ahead_pass(plan);
        if (plan->furthest_holds && plan->units[unit].block) /* the others' visits stay */
            oo_furthest_put(&plan->furthest, unit, oo__next_visit(plan, unit));
    } else {
        plan->confirmed = 0;
        oo__ahead_reset(plan);
        plan->furthest_holds = 0;
    }
    oo__learn_round(plan);
}

void oo_plan_visit(struct oo_plan *plan, uint32_t unit, enum oo_kind kind) {
    const uint64_t previous = plan->units[unit].last;
    plan->trace[plan->now & OO_TRACE_MASK] =
        (struct oo_trace_entry){unit, kind, previous, OO_NOWHERE, oo__forwards(plan, kind)};
    if (previous != OO_NOWHERE && oo__remembered(plan, previous))
        plan->trace[previous & OO_TRACE_MASK].next = plan->now;
    plan->units[unit].last = plan->now++;
    if (plan->units[unit].seconds <= 0 && !plan->units[unit].measured)
        plan->untimed = plan->now;
    /* The prediction held if the visit after the match is this one. Until it has done so for a
     * whole period, each turn may show a better match. */
    const uint64_t expected = plan->match + 1;
    const enum oo_kind before = plan->now > 1 ? oo__visit_at(plan, plan->now - 2)->kind : kind;
    const int turned = oo__is_forward(kind) != oo__is_forward(before);
    if (turned) /* what comes after a backward is expected to be training */
        plan->alike = oo__is_forward(kind);
    const int repeats = oo__remembered(plan, plan->match) && expected < plan->now - 1 &&
                        oo__same_visit(plan, expected, plan->now - 1);
    plan->alike = plan->alike && (repeats || turned);
    /* Within a forward of which some layers are recorded a few units may look like a round. */
    const int is_whole = 2 * plan->rounds.length >= plan->n_tape;
    const int trains =
        !oo__is_forward(kind) || (kind == OO_RECORDED && before == OO_FORWARD && is_whole);
    const int in_rounds = plan->rounds.on && !trains;
    if (plan->rounds.on && trains)
        oo__end_rounds(plan);
    if (!oo__is_forward(kind))
        plan->rounds.last = 0;
    else if (turned)
        oo__end_step(plan);
    uint64_t match = repeats && !(turned && plan->confirmed < plan->now - 1 - expected)
                         ? expected
                         : oo__find_match(plan);
    if (match == OO_NOWHERE && oo__is_forward(kind) && !plan->alike) {
        plan->alike = 1; /* the first of its kind is expected to go as the other does */
        match = oo__find_match(plan);
        plan->alike = match != OO_NOWHERE;
    }
    oo__follow(plan, match, repeats && match == expected);
    if (in_rounds && !plan->rounds.on) /* those that are repeated end here; these may go on */
        oo__follow(plan, oo__find_match(plan), 0);
    if (kind == OO_BACKWARD)
        oo__learn_block(plan);
    if (turned && !oo__is_forward(kind))
        oo__learn_order(plan);
    else if (turned)
        oo__learn_piles(plan);
}

void oo_plan_expect(struct oo_plan *plan, const struct oo_visit *visits, size_t count) {
    /* Twice: a prediction is what followed the same past before. */
    for (size_t i = 0; i < 2 * count; i++)
        oo_plan_visit(plan, visits[i % count].unit, visits[i % count].kind);
    plan->expected = plan->now;
    plan->untimed = 0;
    plan->rounds.layout = OO_NOWHERE; /* places go by seconds, which are expected next */
}
