/* forecast.c - when each unit is used next, and how long that takes: what followed the same past
 * before, and what was measured. */
#include "planning.h"

/* What chose them: see planning.h. Bounds of one search for a match: earlier visits, and how far
 * back each is compared. So many that thirty samples do not hide the training before them, where 32
 * was too few; 32 of the past instead of 256 change no cell. */
enum { OO_CANDIDATES = 128, OO_CONTEXT = 256 };
/* Uses of a unit looked at to find one far off. 4 change no cell. */
enum { OO_LOOKAHEAD = 16 };
/* Forwards of each unit that are measured; of all, a prime, so that each is measured sooner or
 * later. One forward changes no cell: nothing disturbs the simulator. */
enum { OO_MEASURED = 4, OO_REMEASURED_ONE_IN = 4093 };
/* Of copies that were measured: the latest sixteen count. 64 change no cell. */
static const double oo__memory = 15.0 / 16;

/* ---- the trace and the match ---- */

int oo__same_visit(const struct oo_plan *plan, uint64_t a, uint64_t b) {
    const struct oo_trace_entry *one = oo__visit_at(plan, a), *other = oo__visit_at(plan, b);
    return one->unit == other->unit &&
           (one->kind == other->kind ||
            (plan->alike && oo__is_forward(one->kind) && oo__is_forward(other->kind)));
}

/* How many visits before a and b are equal, with a and b. */
static uint64_t oo__equal_past(const struct oo_plan *plan, uint64_t a, uint64_t b) {
    uint64_t length = 1;
    while (length < OO_CONTEXT && length <= a && oo__remembered(plan, a - length) &&
           oo__same_visit(plan, a - length, b - length))
        length++;
    return length;
}

/* How many visits after a and b are equal; a is the earlier one. */
static uint64_t oo__equal_future(const struct oo_plan *plan, uint64_t a, uint64_t b) {
    uint64_t length = 0;
    while (b + length + 1 < plan->now && oo__same_visit(plan, a + length + 1, b + length + 1))
        length++;
    return length;
}

uint64_t oo__find_match(const struct oo_plan *plan) {
    const uint64_t current = plan->now - 1;
    uint64_t best[3] = {OO_NOWHERE, OO_NOWHERE, OO_NOWHERE}; /* the latest first */
    uint64_t best_length = 0;
    int n_best = 0;
    uint64_t candidate = oo__visit_at(plan, current)->previous;
    for (int tried = 0; tried < OO_CANDIDATES && oo__remembered(plan, candidate);
         candidate = oo__visit_at(plan, candidate)->previous) {
        if (!oo__same_visit(plan, candidate, current))
            continue;
        tried++;
        const uint64_t length = oo__equal_past(plan, candidate, current);
        if (length > best_length)
            n_best = 0;
        if (length < best_length || n_best == 3)
            continue;
        best_length = length;
        best[n_best++] = candidate;
    }
    if (n_best < 3 || best_length == 1) /* few, or nothing before them is alike */
        return best[0];
    const uint64_t repeated = oo__equal_future(plan, best[1], best[0]);
    const int is_exception =
        best[0] + repeated + 1 < plan->now && oo__equal_future(plan, best[2], best[1]) > repeated;
    return best[is_exception];
}

struct oo_plan_unit *oo__first_met(struct oo_plan *plan, uint64_t index) {
    struct oo_plan_unit *unit = &plan->units[oo__visit_at(plan, index)->unit];
    if (unit->mark == plan->marks)
        return NULL;
    unit->mark = plan->marks;
    return unit;
}

void oo__learn_block(struct oo_plan *plan) {
    const uint64_t current = plan->now - 1;
    uint64_t begin = oo__visit_at(plan, current)->previous;
    while (oo__remembered(plan, begin) && oo__visit_at(plan, begin)->kind == OO_BACKWARD)
        begin = oo__visit_at(plan, begin)->previous;
    if (!oo__remembered(plan, begin) || oo__visit_at(plan, begin)->kind != OO_RECOMPUTE)
        return;
    if (current - begin <= plan->longest_block)
        return;
    size_t bytes = 0;
    plan->marks++;
    for (uint64_t i = begin; i < current; i++) {
        if (oo__is_forward_at(plan, i))
            return; /* another step is between: not one block */
        struct oo_plan_unit *between = oo__first_met(plan, i);
        if (between)
            bytes += between->bytes;
    }
    plan->longest_block = current - begin;
    if (bytes > plan->block_bytes)
        plan->block_bytes = bytes;
}

uint64_t oo__forwards(const struct oo_plan *plan, enum oo_kind kind) {
    if (!oo__is_forward(kind))
        return 0;
    return plan->now ? oo__visit_at(plan, plan->now - 1)->forwards + 1 : 1;
}

/* ---- the next use ---- */

uint64_t oo__guess_next_use(const struct oo_plan *plan, uint32_t unit) {
    if (plan->now == 0)
        return (uint64_t)unit + 1;
    const struct oo_trace_entry *current = oo__visit_at(plan, plan->now - 1);
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

uint64_t oo_plan_since(const struct oo_plan *plan, uint32_t unit) {
    return plan->now - plan->units[unit].last;
}

uint64_t oo__next_visit(const struct oo_plan *plan, uint32_t unit) {
    const uint64_t next = oo_plan_next_use(plan, unit);
    return next == OO_NEVER ? OO_NEVER : plan->match + next;
}

uint64_t oo__use_after(const struct oo_plan *plan, uint64_t index) {
    const struct oo_trace_entry *visit = oo__visit_at(plan, index);
    if (visit->next != OO_NOWHERE)
        return visit->next;
    return plan->match + oo_plan_next_use(plan, visit->unit) +
           (plan->now - 1 - plan->match); /* a period later */
}

uint64_t oo__use_in_next_forward(const struct oo_plan *plan, uint64_t index) {
    for (int i = 0; i < OO_LOOKAHEAD && index < plan->now; i++) {
        if (oo__is_forward_at(plan, index))
            break;
        index = oo__use_after(plan, index);
    }
    return index;
}

uint64_t oo__next_use_after(const struct oo_plan *plan, uint32_t unit, uint64_t distance) {
    uint64_t use = oo_plan_next_use(plan, unit);
    if (!oo__remembered(plan, plan->match))
        return use;
    for (int i = 0; i < OO_LOOKAHEAD && use <= distance && plan->match + use < plan->now; i++)
        use = oo__use_after(plan, plan->match + use) - plan->match;
    return use;
}

uint64_t oo_plan_first_visit(const struct oo_plan *plan) {
    return plan->now < OO_TRACE ? 0 : plan->now - OO_TRACE + 1;
}

uint64_t oo_plan_end_of_visits(const struct oo_plan *plan) { return plan->now; }

struct oo_visit oo_plan_visit_at(const struct oo_plan *plan, uint64_t number) {
    const struct oo_trace_entry *entry = oo__visit_at(plan, number);
    return (struct oo_visit){entry->unit, entry->kind};
}

/* ---- seconds ---- */

int oo__all_are_timed(const struct oo_plan *plan, const struct oo_trace_entry *current) {
    return plan->untimed <= current->previous;
}

int oo_plan_wants_seconds(const struct oo_plan *plan) {
    const struct oo_trace_entry *current = oo__visit_at(plan, plan->now - 1);
    return oo__is_forward(current->kind) && current->previous != OO_NOWHERE &&
           current->previous >= plan->expected &&
           (plan->units[current->unit].begun <
                (oo__all_are_timed(plan, current) ? OO_MEASURED : 1) ||
            plan->now % OO_REMEASURED_ONE_IN == 0);
}

void oo_plan_measures(struct oo_plan *plan, uint32_t unit, int begins) {
    if (begins)
        plan->units[unit].begun++;
    else
        plan->units[unit].begun--;
}

void oo_plan_took(struct oo_plan *plan, uint32_t unit, double seconds) {
    struct oo_plan_unit *u = &plan->units[unit];
    const double before_s = u->seconds;
    if (u->removed)
        return; /* what was measured may come late */
    /* Whatever disturbs a measurement makes it longer. */
    const int counts = !u->measured++ || seconds < before_s;
    u->seconds = counts ? seconds : before_s + (seconds - before_s) / 8;
}

static void oo__copied(struct oo_copied *copied, size_t bytes, double seconds) {
    copied->bytes = copied->bytes * oo__memory + (double)bytes;
    copied->seconds = copied->seconds * oo__memory + seconds;
}

void oo_plan_copied(struct oo_plan *plan, uint32_t unit, size_t bytes, double seconds) {
    oo__copied(&plan->copied[plan->units[unit].far], bytes, seconds);
}

void oo_plan_expect_seconds(struct oo_plan *plan, uint32_t unit, double seconds) {
    if (!plan->units[unit].measured)
        plan->units[unit].seconds = seconds;
}

/* It weighs as one copy does. */
void oo_plan_expect_link(struct oo_plan *plan, double bps) {
    if (plan->copied[0].seconds > 0 || !plan->n_units)
        return;
    const size_t bytes = plan->units_bytes / plan->n_units;
    oo__copied(&plan->copied[0], bytes, (double)bytes / bps);
}

double oo_plan_seconds(const struct oo_plan *plan, uint32_t unit) {
    return plan->units[unit].seconds;
}

static double oo__bps(const struct oo_copied *copied) {
    return copied->seconds > 0 ? copied->bytes / copied->seconds : 0;
}

double oo_plan_link_bps(const struct oo_plan *plan) { return oo__bps(&plan->copied[0]); }

double oo__disk_bps(const struct oo_plan *plan) { return oo__bps(&plan->copied[1]); }
