/* places.c - where a unit is in the arena: on the tape, in a pile, in a round. */
#include "planning.h"

/* What chose them: see planning.h. Turns among which one that fits is sought. First sweeps: 1.052
 * with 8, 1.047 with 512, which looks at eight times as many for each place. */
enum { OO_LAID_AHEAD = 64 };
/* A ring between training steps, in units as large as the largest. In the previews of
 * FLUX.1 and SDXL, 1, 2 and 4 have samples at 1.174, 1.149 and 1.165 of the bound, and the first
 * step after them at 1.096, 1.103 and 1.117. */
enum { OO_SLOTS_BETWEEN = 2 };
/* What is in memory passes through a ring of so many of its largest units, and of so small a part
 * of the arena at most. With 2 a step of FLUX.1 over a disk of 7 GB/s takes 1.14 of its bound, with
 * 3 1.05, with 4 1.06. */
enum { OO_NEAR_SLOTS = 3, OO_NEAR_SHARE = 4 };

/* ---- on the tape ---- */

int oo__is_settled(const struct oo_plan *plan, const struct oo_plan_unit *unit) {
    return unit->round == plan->rounds.number && unit->round_place < plan->tape_floor;
}

/* A place begins where the one before it ends, around the arena; but not where settled units are,
 * nor those that come first and stay in use meanwhile, as no other unit finds that free. */
static void oo__put_on_tape(struct oo_plan *plan, struct oo_plan_unit *unit) {
    struct oo_tape *tape = &plan->tapes[unit->tape];
    const size_t end = tape->end;
    if (oo__is_settled(plan, unit)) {
        unit->tape_place = unit->round_place;
        return;
    }
    unit->tape_place = oo_arena_fit(&plan->arena, end, unit->bytes);
    if (unit->tape_place < end || unit->tape_place + unit->bytes > tape->limit)
        unit->tape_place = oo_arena_fit(&plan->arena, tape->begin, unit->bytes);
    tape->end = unit->tape_place + unit->bytes;
    if (unit->stays && end == tape->begin)
        tape->begin = tape->end;
}

int oo__is_small(const struct oo_plan *plan) {
    return plan->arena.total_bytes < 2 * plan->block_bytes;
}

/* Bytes of a ring for what is in memory, where some is on a disk and the arena holds many units. 0:
 * it is not parted. */
static size_t oo__ring_of_near(const struct oo_plan *plan) {
    const size_t room = plan->arena.total_bytes - plan->tape_floor;
    size_t near = 0, far = 0, largest = 0;
    for (uint32_t i = 0; i < plan->n_units; i++) {
        const struct oo_plan_unit *unit = &plan->units[i];
        if (unit->removed)
            continue;
        *(unit->far ? &far : &near) += unit->bytes;
        largest = !unit->far && unit->bytes > largest ? unit->bytes : largest;
    }
    const size_t ring = OO_NEAR_SLOTS * largest;
    return !oo__is_small(plan) && ring <= room / OO_NEAR_SHARE && ring + far > room &&
                   near + far >= 2 * room
               ? ring
               : 0;
}

/* Give each unit of the tape its place, in order. 0 < `ring`: these last bytes of the arena are for
 * what is in memory. But what is as near to an end of the tape as the arena is large stays there
 * while training turns: all of the arena is for that. */
static void oo__lay_with(struct oo_plan *plan, size_t ring) {
    const size_t floor = plan->tape_floor, limit = plan->arena.total_bytes - ring;
    size_t begun = 0, left = 0, before = 0;
    plan->parted = ring != 0;
    plan->tapes[0] = (struct oo_tape){ring ? limit : floor, limit + ring, ring ? limit : floor};
    plan->tapes[1] = (struct oo_tape){floor, limit, floor};
    for (uint32_t i = 0; i < plan->n_units; i++)
        plan->units[i].tape = ring && plan->units[i].far;
    for (uint32_t i = 0; i < plan->n_tape; i++)
        left += plan->units[plan->tape[i]].removed ? 0 : plan->units[plan->tape[i]].bytes;
    for (uint32_t i = 0; i < plan->n_tape; i++) {
        struct oo_plan_unit *unit = &plan->units[plan->tape[i]];
        if (unit->removed)
            continue;
        const size_t to_begin = begun + unit->bytes, to_end = left;
        const size_t to_turn = to_begin < to_end ? to_begin : to_end;
        if (ring && to_turn <= limit - floor + ring)
            unit->tape = to_turn > ring;
        if (ring && to_end <= ring && to_end + before > ring)
            plan->tapes[0].end = plan->tapes[0].begin; /* so that all of these fit */
        before = unit->bytes;
        begun += before;
        left -= before;
        oo__put_on_tape(plan, unit);
    }
}

/* The same order, around another arena. Where it is parted, what is in memory comes soon enough
 * through a ring, and what leaves it room is read farther ahead. */
static void oo__lay_tape(struct oo_plan *plan) {
    const size_t ring = oo__ring_of_near(plan);
    plan->tape_layout = plan->arena.layout;
    oo__ahead_reset(plan);
    /* Where nothing is known yet, in order of creation. */
    for (uint32_t i = 0; ring && plan->n_tape == i && i < plan->n_units; i++) {
        plan->tape[plan->n_tape++] = i;
        plan->units[i].rank = plan->n_tape;
    }
    oo__lay_with(plan, ring);
}

void oo__learn_tape(struct oo_plan *plan) {
    if (plan->tape_layout == plan->arena.layout)
        return;
    if (plan->rounds.layout != plan->arena.layout)
        plan->tape_floor = 0; /* no unit is settled there */
    oo__lay_tape(plan);
}

size_t oo__tape_place(struct oo_plan *plan, uint32_t id) {
    struct oo_plan_unit *unit = &plan->units[id];
    oo__learn_tape(plan);
    if (!unit->rank) {
        plan->tape[plan->n_tape++] = id;
        unit->rank = plan->n_tape;
        oo__put_on_tape(plan, unit);
    }
    return unit->tape_place;
}

/* Whether either end of the tape is a unit that is not in use, as another model's: then training
 * turns elsewhere. */
static int oo__ends_rest(const struct oo_plan *plan) {
    const uint32_t first = plan->tape[0], last = plan->tape[plan->n_tape - 1];
    return !oo__remembered(plan, plan->units[first].last) ||
           !oo__remembered(plan, plan->units[last].last);
}

void oo__learn_order(struct oo_plan *plan) {
    const uint64_t end = plan->now - 1;
    uint64_t begin = end;
    while (begin > 0 && oo__remembered(plan, begin - 1) && oo__is_forward_at(plan, begin - 1))
        begin--;
    uint32_t rank = 0;
    int kept = 1;
    plan->marks++;
    for (uint64_t i = begin; i < end && kept; i++) {
        const struct oo_plan_unit *unit = oo__first_met(plan, i);
        kept = !unit || unit->rank > rank;
        rank = unit ? unit->rank : rank;
    }
    if (kept && !(plan->parted && oo__ends_rest(plan)))
        return;
    for (uint32_t i = 0; i < plan->n_tape; i++)
        plan->units[plan->tape[i]].rank = 0;
    plan->n_tape = 0;
    for (uint64_t i = begin; i < end; i++) {
        const uint32_t id = oo__visit_at(plan, i)->unit;
        if (plan->units[id].rank)
            continue;
        plan->tape[plan->n_tape++] = id;
        plan->units[id].rank = plan->n_tape;
    }
    plan->tape_layout = OO_NOWHERE;
    oo__learn_tape(plan);
}

/* Where the unit is in the arena; OO_ANYWHERE: it is not there. */
static size_t oo__position(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_block *block = plan->units[unit].block;
    if (!block)
        return OO_ANYWHERE;
    size_t begin = 0;
    for (const struct oo_segment *s = plan->arena.segments; s != block->segment; s = s->next)
        begin += s->bytes;
    return begin + block->offset;
}

int oo__is_misplaced(struct oo_plan *plan, uint32_t unit) {
    const size_t position = oo__position(plan, unit);
    return position != OO_ANYWHERE && !plan->units[unit].pins && plan->units[unit].rank &&
           position != oo__tape_place(plan, unit);
}

/* ---- in a pile ---- */

/* In a backward a block's units are recomputed first to last, then used last to first: what the
 * last one leaves is free first, and is where the next block's first unit has to begin. So blocks
 * that do not fit next to each other are piled up from the arena's begin and from its end in turn,
 * and come in as far as the one before them has gone. */
struct oo_pile {
    int from_end;
    size_t block, height; /* where the latest block begins, and ends so far */
};

static void oo__pile_block(const struct oo_plan *plan, struct oo_pile *pile, size_t bytes) {
    if (pile->height + bytes > plan->arena.total_bytes) {
        pile->from_end ^= bytes > pile->block;
        pile->height = 0;
    }
    pile->block = pile->height;
}

/* 0: there is no room left. */
static int oo__pile_unit(const struct oo_plan *plan, struct oo_pile *pile,
                         struct oo_plan_unit *unit) {
    const size_t total = plan->arena.total_bytes, end = total - pile->height;
    if (pile->from_end)
        unit->pile_place = oo_arena_fit_below(&plan->arena, end, unit->bytes);
    else
        unit->pile_place = oo_arena_fit(&plan->arena, pile->height, unit->bytes);
    if (pile->from_end ? unit->pile_place > end : unit->pile_place < pile->height)
        return 0;
    pile->height = pile->from_end ? total - unit->pile_place : unit->pile_place + unit->bytes;
    return 1;
}

/* Bytes of the units that are recomputed from visit `begin` on. */
static size_t oo__recomputed_bytes(const struct oo_plan *plan, uint64_t begin) {
    size_t bytes = 0;
    for (uint64_t i = begin; oo__visit_at(plan, i)->kind == OO_RECOMPUTE; i++) {
        const uint64_t previous = oo__visit_at(plan, i)->previous;
        if (previous == OO_NOWHERE || previous < begin)
            bytes += plan->units[oo__visit_at(plan, i)->unit].bytes;
    }
    return bytes;
}

void oo__learn_piles(struct oo_plan *plan) {
    const uint64_t end = plan->now - 1;
    struct oo_pile pile = {0, 0, 0};
    uint64_t begin = end;
    int is_next = 0; /* the next unit begins a block */
    plan->pile_layout = OO_NOWHERE;
    if (!oo__is_small(plan) || plan->arena.total_bytes < plan->block_bytes)
        return;
    while (begin > 0 && oo__remembered(plan, begin - 1) && !oo__is_forward_at(plan, begin - 1))
        begin--;
    plan->marks++;
    for (uint64_t i = begin; i < end; i++) {
        is_next |= oo__visit_at(plan, i)->kind == OO_RECOMPUTE &&
                   (i == begin || oo__visit_at(plan, i - 1)->kind != OO_RECOMPUTE);
        struct oo_plan_unit *unit = oo__first_met(plan, i);
        if (unit && is_next)
            oo__pile_block(plan, &pile, oo__recomputed_bytes(plan, i));
        if (unit && !oo__pile_unit(plan, &pile, unit))
            return;
        is_next = is_next && !unit;
    }
    plan->pile_layout = plan->arena.layout;
}

size_t oo__pile_place(const struct oo_plan *plan, uint64_t index) {
    const struct oo_trace_entry *visit = oo__visit_at(plan, index);
    return !oo__is_forward(visit->kind) && plan->pile_layout == plan->arena.layout
               ? plan->units[visit->unit].pile_place
               : OO_ANYWHERE;
}

/* ---- in a round ---- */

/* Places are given one after the other. */
struct oo_laying {
    size_t end;         /* of those that are */
    size_t next, count; /* no turn before `next` waits */
};

/* Whether the turn's unit stays, has no place yet, and is at no position that comes later. */
static int oo__waits(const struct oo_plan *plan, const struct oo_laying *lay, size_t turn) {
    const uint32_t unit = plan->turns[turn].unit;
    if (plan->units[unit].round_place != OO_ANYWHERE)
        return 0;
    const size_t position = oo__position(plan, unit);
    return position == OO_ANYWHERE || position < lay->end;
}

static void oo__lay(struct oo_plan *plan, struct oo_laying *lay, struct oo_plan_unit *unit) {
    unit->round_place = oo_arena_fit(&plan->arena, lay->end, unit->bytes);
    lay->end = unit->round_place + unit->bytes;
}

/* Give those that wait the places in front of `until`, the largest first, so that hardly any of it
 * is left over. */
static void oo__lay_until(struct oo_plan *plan, struct oo_laying *lay, size_t until) {
    struct oo_plan_unit *largest;
    do {
        largest = NULL;
        while (lay->next < lay->count && !oo__waits(plan, lay, lay->next))
            lay->next++;
        for (size_t i = lay->next; i < lay->count && i < lay->next + OO_LAID_AHEAD; i++) {
            struct oo_plan_unit *unit = &plan->units[plan->turns[i].unit];
            if (lay->end + unit->bytes <= until && oo__waits(plan, lay, i) &&
                (!largest || unit->bytes > largest->bytes))
                largest = unit;
        }
        if (largest)
            oo__lay(plan, lay, largest);
    } while (largest);
}

/* A unit that is in the arena keeps its own place if others fill what is in front of it. Returns
 * whether most do: what moves has to be copied again. */
static int oo__lay_in_place(struct oo_plan *plan, struct oo_laying lay, size_t *end) {
    size_t begin = 0, kept = 0, moved = 0;
    for (const struct oo_segment *s = plan->arena.segments; s; begin += s->bytes, s = s->next)
        for (const struct oo_block *block = s->first; block; block = block->next) {
            const size_t position = begin + block->offset;
            if (block->unit == OO_NO_UNIT || position < lay.end)
                continue;
            struct oo_plan_unit *unit = &plan->units[block->unit];
            if (unit->round != plan->rounds.number || unit->round_place != OO_ANYWHERE)
                continue;
            oo__lay_until(plan, &lay, position);
            oo__lay(plan, &lay, unit);
            *(unit->round_place == position ? &kept : &moved) += unit->bytes;
        }
    *end = lay.end;
    return kept >= 2 * moved;
}

static void oo__unlay(struct oo_plan *plan, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!plan->turns[i].kept)
            plan->units[plan->turns[i].unit].round_place =
                plan->turns[i].stays ? OO_ANYWHERE : OO_IN_RING;
}

size_t oo__lay_from(struct oo_plan *plan, size_t end, size_t count) {
    struct oo_laying lay = {.end = end, .count = count};
    oo__unlay(plan, count);
    if (!plan->rounds.between && !oo__lay_in_place(plan, lay, &lay.end)) {
        lay.end = end;
        oo__unlay(plan, count);
    }
    for (size_t i = 0; i < count; i++)
        if (plan->units[plan->turns[i].unit].round_place == OO_ANYWHERE)
            oo__lay(plan, &lay, &plan->units[plan->turns[i].unit]);
    return lay.end;
}

size_t oo__lay_as_is(struct oo_plan *plan, size_t largest) {
    const size_t total = plan->arena.total_bytes, slots = OO_SLOTS_BETWEEN * largest;
    const size_t most = total - (slots < total / 2 ? slots : total / 2);
    size_t begin = 0, end = 0;
    for (const struct oo_segment *s = plan->arena.segments; s; begin += s->bytes, s = s->next)
        for (const struct oo_block *block = s->first; block; block = block->next)
            if (block->unit != OO_NO_UNIT && begin + block->offset + block->bytes <= most) {
                plan->units[block->unit].round_place = begin + block->offset;
                end = begin + block->offset + block->bytes;
            }
    return end;
}

int oo__has_round_place(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_rounds *rounds = &plan->rounds;
    return (rounds->on || (rounds->last && rounds->layout == plan->arena.layout)) &&
           plan->units[unit].round == rounds->number &&
           plan->units[unit].round_place != OO_ANYWHERE;
}

size_t oo__round_place(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_rounds *rounds = &plan->rounds;
    const size_t bytes = plan->units[unit].bytes;
    if (plan->units[unit].round_place != OO_IN_RING)
        return plan->units[unit].round_place;
    const size_t place = oo_arena_fit(&plan->arena, rounds->cursor, bytes);
    return place >= rounds->cursor && unit != rounds->first
               ? place
               : oo_arena_fit(&plan->arena, rounds->ring, bytes);
}
