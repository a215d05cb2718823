/* plan.c - prediction, Belady's rule, homes; see plan.h. */
#include "plan.h"

#include "../base/status.h"
#include "furthest.h"
#include "round.h"

#include <stdlib.h>
#include <string.h>

/* Visits remembered. A step of a model with 1,000 units is 3,000 visits; the match needs one
 * earlier period and the current one. */
enum { OO_TRACE_BITS = 16, OO_TRACE = 1 << OO_TRACE_BITS, OO_TRACE_MASK = OO_TRACE - 1 };
_Static_assert(2 * OO_MAX_EXPECTED <= OO_TRACE, "what is expected is remembered twice");
enum { OO_CANDIDATES = 128, OO_CONTEXT = 256 }; /* bounds of one search for a match */
enum { OO_LOOKAHEAD = 16 };                     /* uses of a unit looked at to find one far off */
enum { OO_FEW = 400 };                          /* units in the arena that are all looked at */
enum { OO_MANY_ROUNDS = 8 };                    /* of samples: more are no interruption */
enum { OO_ROUNDS_TO_COME = 32 };                /* of samples alone, at least */
enum { OO_LAID_AHEAD = 64 };                    /* turns among which one that fits is sought */
enum { OO_SLOTS_BETWEEN = 2 };                  /* of the largest unit: a ring before that */
enum { OO_SHARES = 6 }; /* of the arena: training goes around one at least */
enum { OO_MEASURED = 4, OO_REMEASURED_ONE_IN = 4093 }; /* forwards of each unit; of all, a prime */
enum { OO_MEASURED_ROUNDS = 6 };                       /* in which all of a round are, at most */
static const double oo__memory = 15.0 / 16;            /* of copies that were measured */
#define OO_NOWHERE UINT64_MAX                          /* an index into the trace that is none */

struct oo_trace_entry {
    uint32_t unit;
    enum oo_kind kind;
    uint64_t previous, next; /* indices of this unit's visits before and after, or OO_NOWHERE */
    uint64_t forwards;       /* visits up to this one that are forward, without a break */
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
    uint64_t last;     /* index of its latest visit */
    uint64_t mark;     /* scratch: the walk over the trace that has met it */
    size_t home;       /* position in the arena */
    size_t pile;       /* in a backward, where piles count; OO_ANYWHERE: it is in none */
    uint32_t rank;     /* its place among the homes, from 1; 0: it has none */
    uint64_t round;    /* the latest one laid with it */
    size_t place;      /* in that: a position in the arena, OO_IN_RING or OO_ANYWHERE */
    double seconds;    /* of a forward, until the next visit; 0: not known */
    uint32_t measured; /* so often */
    uint32_t begun;    /* so many measurements, which end later */
    uint32_t pins;
    uint64_t since; /* visits before its first pin */
    uint8_t ahead, removed;
    uint8_t stays; /* in use while others come and go, as what is lent to a whole model is */
};

/* Units that are used in turn, over and over: those that stay lie in front, the others stream
 * through the rest of the arena, one after the other and around it. */
#define OO_IN_RING (OO_ANYWHERE - 1)
struct oo_rounds {
    int on;          /* the visits expected next are such a round */
    uint64_t count;  /* of those that have come */
    uint64_t before; /* likewise, the last time */
    int many;        /* either is so many that those that stay may be spread */
    int between;     /* training has come before */
    int spread;      /* those that stay are */
    int over;        /* until a moment ago: in the forward of this step */
    int spread_over; /* likewise, and those that stay are spread */
    int timed;       /* they are laid by their seconds */
    int newly_timed; /* and were not until now */
    int last;        /* this forward is training's, and its units go as in those rounds */
    uint64_t number; /* rounds laid so far */
    uint64_t length; /* of the latest, in visits */
    uint64_t layout; /* the arena's, when the latest was */
    size_t ring;     /* where it begins */
    size_t cursor;   /* where the next unit in it may */
    uint32_t first;  /* of the units that lie in it, in each round */
};

struct oo_plan {
    struct oo_arena arena;
    struct oo_plan_unit *units;
    uint32_t n_units, capacity;
    struct oo_trace_entry *trace; /* ring: visit i at i & OO_TRACE_MASK */
    uint64_t now;                 /* visits so far; the current one is now - 1 */
    uint64_t expected;            /* those before this one were another run's */
    uint64_t untimed;             /* those behind this one were of units with seconds */
    uint64_t match;     /* an earlier visit after which the future is expected to repeat */
    uint64_t confirmed; /* for so many visits it has */
    int alike;          /* for now, recorded forwards and others count as one kind */
    struct oo_ahead ahead;
    struct oo_furthest furthest; /* what is in the arena, by the visits that are predicted */
    int furthest_holds;          /* they still are */
    uint64_t longest_block;      /* in visits: shorter ones need no counting */
    size_t block_bytes;
    uint64_t marks;  /* walks over the trace so far */
    uint32_t *homes; /* the units that have one, in order */
    uint32_t n_homes;
    uint64_t home_layout; /* the arena's layout that they were given in */
    size_t home_floor;    /* of all laps: those that samples have spread lie in front of it */
    size_t home_begin;    /* of a lap but the first: behind what stays */
    size_t home_end;      /* where the next one may begin */
    int relaid;           /* homes were, clear of what stays: others may lie elsewhere */
    uint32_t stray;       /* units before this one have left if they lie elsewhere */
    uint64_t pile_layout; /* the arena's layout that piles count in */
    struct oo_rounds rounds;
    struct oo_turn *turns;         /* scratch */
    double copied_bytes, copied_s; /* the latest copies */
    size_t units_bytes;            /* all units that there are */
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
    plan->stray = UINT32_MAX;
    plan->pile_layout = OO_NOWHERE;
    return OO_OK;
}

void oo_plan_destroy(struct oo_plan *plan) {
    if (!plan)
        return;
    oo_arena_clear(&plan->arena);
    free(plan->trace);
    free(plan->ahead.queue);
    free(plan->units);
    free(plan->homes);
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
        uint32_t *homes = realloc(plan->homes, capacity * sizeof *homes);
        plan->homes = homes ? homes : plan->homes;
        struct oo_turn *turns = realloc(plan->turns, capacity * sizeof *turns);
        plan->turns = turns ? turns : plan->turns;
        if (!units || !homes || !turns || !oo_furthest_reserve(&plan->furthest, capacity))
            return oo__fail(OO_E_MEMORY, "no memory for %u units", capacity);
        plan->capacity = capacity;
        plan->allocations += 5;
    }
    if (!oo_arena_reserve(&plan->arena))
        return oo__fail(OO_E_MEMORY, "no memory for a unit's place in the arena");
    plan->units[plan->n_units] =
        (struct oo_plan_unit){.bytes = bytes, .last = OO_NOWHERE, .pile = OO_ANYWHERE, .ahead = 1};
    plan->units_bytes += bytes;
    *unit = plan->n_units++;
    return OO_OK;
}

void oo_plan_unit_remove(struct oo_plan *plan, uint32_t unit) {
    struct oo_plan_unit *u = &plan->units[unit];
    u->seconds = 0;
    u->removed = 1;
    plan->units_bytes -= u->bytes;
    plan->home_layout = OO_NOWHERE; /* its home goes to others */
}

static void oo__ahead_reset(struct oo_plan *plan) { plan->ahead.end = 0; }

void oo_plan_allow(struct oo_plan *plan, uint32_t unit, int ahead) {
    if (plan->units[unit].ahead == ahead)
        return;
    plan->units[unit].ahead = ahead != 0;
    oo__ahead_reset(plan); /* it may have been passed over */
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
    plan->home_layout = OO_NOWHERE; /* the homes of others keep clear of it */
    plan->relaid = 1;
}
uint32_t oo_plan_pins(const struct oo_plan *plan, uint32_t unit) { return plan->units[unit].pins; }
size_t oo_plan_block_bytes(const struct oo_plan *plan) { return plan->block_bytes; }
struct oo_block *oo_plan_resident(const struct oo_plan *plan, uint32_t unit) {
    return plan->units[unit].block;
}

/* ---- the trace and the match ---- */

static const struct oo_trace_entry *oo__visit_at(const struct oo_plan *plan, uint64_t index) {
    return &plan->trace[index & OO_TRACE_MASK];
}

static int oo__remembered(const struct oo_plan *plan, uint64_t index) {
    return index != OO_NOWHERE && index + OO_TRACE > plan->now;
}

static int oo__is_forward(enum oo_kind kind) { return kind == OO_FORWARD || kind == OO_RECORDED; }

static int oo__is_forward_at(const struct oo_plan *plan, uint64_t index) {
    return oo__is_forward(oo__visit_at(plan, index)->kind);
}

static int oo__same_visit(const struct oo_plan *plan, uint64_t a, uint64_t b) {
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

/* Among earlier visits like the current one, the one preceded by the longest equal past; of equals
 * the latest, so that the period is the shortest that explains what was seen. But where what
 * followed the two before it was the same for longer, as in training that was interrupted by
 * samples, the latest is the exception, and the one before it the rule. */
static uint64_t oo__find_match(const struct oo_plan *plan) {
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

/* The unit of visit `index`, if the walk that began with `marks++` had not met it before. */
static struct oo_plan_unit *oo__first_met(struct oo_plan *plan, uint64_t index) {
    struct oo_plan_unit *unit = &plan->units[oo__visit_at(plan, index)->unit];
    if (unit->mark == plan->marks)
        return NULL;
    unit->mark = plan->marks;
    return unit;
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
    plan->marks++;
    for (uint64_t i = begin; i < current; i++) {
        if (oo__is_forward_at(plan, i))
            return; /* another step lies between: not one block */
        struct oo_plan_unit *between = oo__first_met(plan, i);
        if (between)
            bytes += between->bytes;
    }
    plan->longest_block = current - begin;
    if (bytes > plan->block_bytes)
        plan->block_bytes = bytes;
}

/* ---- homes ---- */

/* Samples have spread it, and training leaves it there. */
static int oo__is_settled(const struct oo_plan *plan, const struct oo_plan_unit *unit) {
    return unit->round == plan->rounds.number && unit->place < plan->home_floor;
}

/* A home begins where the one before it ends, around the arena; but not where those lie that are
 * settled, nor those that come first and stay in use meanwhile, as nobody else finds that free. */
static void oo__give_home(struct oo_plan *plan, struct oo_plan_unit *unit) {
    const size_t end = plan->home_end;
    if (oo__is_settled(plan, unit)) {
        unit->home = unit->place;
        return;
    }
    unit->home = oo_arena_fit(&plan->arena, end, unit->bytes);
    if (unit->home < end)
        unit->home = oo_arena_fit(&plan->arena, plan->home_begin, unit->bytes);
    plan->home_end = unit->home + unit->bytes;
    if (unit->stays && end == plan->home_begin)
        plan->home_begin = plan->home_end;
}

static size_t oo__home(struct oo_plan *plan, uint32_t id) {
    struct oo_plan_unit *unit = &plan->units[id];
    if (plan->home_layout != plan->arena.layout) { /* the same order, around another arena */
        plan->home_layout = plan->arena.layout;
        if (plan->rounds.layout != plan->arena.layout)
            plan->home_floor = 0; /* nobody is settled there */
        plan->home_begin = plan->home_end = plan->home_floor;
        for (uint32_t i = 0; i < plan->n_homes; i++)
            if (!plan->units[plan->homes[i]].removed)
                oo__give_home(plan, &plan->units[plan->homes[i]]);
    }
    if (!unit->rank) {
        plan->homes[plan->n_homes++] = id;
        unit->rank = plan->n_homes;
        oo__give_home(plan, unit);
    }
    return unit->home;
}

/* Forward turns into backward: lay the homes in the order of the forward that has just ended.
 * They keep their places as long as that order only skips units. */
static void oo__learn_order(struct oo_plan *plan) {
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
    if (kept)
        return;
    for (uint32_t i = 0; i < plan->n_homes; i++)
        plan->units[plan->homes[i]].rank = 0;
    plan->n_homes = 0;
    plan->home_begin = plan->home_end = plan->home_floor;
    for (uint64_t i = begin; i < end; i++)
        (void)oo__home(plan, oo__visit_at(plan, i)->unit);
}

/* ---- piles ---- */

/* In a backward a block's units are recomputed first to last, then used last to first: what the
 * last one leaves is free first, and is where the next block's first unit has to begin. So blocks
 * that do not fit beside each other are piled up from the arena's begin and from its end in turn,
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
        unit->pile = oo_arena_fit_below(&plan->arena, end, unit->bytes);
    else
        unit->pile = oo_arena_fit(&plan->arena, pile->height, unit->bytes);
    if (pile->from_end ? unit->pile > end : unit->pile < pile->height)
        return 0;
    pile->height = pile->from_end ? total - unit->pile : unit->pile + unit->bytes;
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

/* Less than two blocks do not fit beside each other. */
static int oo__is_small(const struct oo_plan *plan) {
    return plan->arena.total_bytes < 2 * plan->block_bytes;
}

/* Backward turns into the next forward: lay the piles that the one that has just ended calls for,
 * in an arena that holds a block, and not two. */
static void oo__learn_piles(struct oo_plan *plan) {
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

/* Where a predicted visit wants its unit if in a pile; OO_ANYWHERE: in none. */
static size_t oo__pile(const struct oo_plan *plan, uint64_t index) {
    const struct oo_trace_entry *visit = oo__visit_at(plan, index);
    return !oo__is_forward(visit->kind) && plan->pile_layout == plan->arena.layout
               ? plan->units[visit->unit].pile
               : OO_ANYWHERE;
}

/* ---- rounds ---- */

/* Seconds of a forward where none were measured: as many a byte as the others take. */
static void oo__guess_seconds(struct oo_turn *turns, size_t count) {
    double seconds = 0, bytes = 0;
    for (size_t i = 0; i < count; i++) {
        seconds += turns[i].seconds;
        bytes += turns[i].seconds > 0 ? (double)turns[i].bytes : 0;
    }
    for (size_t i = 0; i < count && bytes > 0; i++)
        if (turns[i].seconds <= 0)
            turns[i].seconds = (double)turns[i].bytes * seconds / bytes;
}

/* The units of the round that begins after the match, in order of use. Returns how many; 0 where
 * most visits are of units that have been met: rounds within a round, of which these are the ones
 * that count. */
static size_t oo__turns(struct oo_plan *plan, uint64_t visits) {
    size_t count = 0, again = 0;
    plan->marks++;
    for (uint64_t i = plan->match + 1; i <= plan->match + visits; i++) {
        const struct oo_trace_entry *visit = oo__visit_at(plan, i);
        const struct oo_plan_unit *unit = oo__first_met(plan, i);
        if (unit)
            plan->turns[count++] = (struct oo_turn){
                .unit = visit->unit, .bytes = unit->bytes, .seconds = unit->seconds};
        else if (visit->previous + 1 != i && ++again > count)
            return 0;
    }
    return count;
}

/* Where the unit lies in the arena; OO_ANYWHERE: it does not. */
static size_t oo__position(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_block *block = plan->units[unit].block;
    if (!block)
        return OO_ANYWHERE;
    size_t begin = 0;
    for (const struct oo_segment *s = plan->arena.segments; s != block->segment; s = s->next)
        begin += s->bytes;
    return begin + block->offset;
}

/* Places are given one after the other. */
struct oo_laying {
    size_t end;         /* of those that are */
    size_t next, count; /* no turn before `next` waits */
};

/* Whether the turn's unit stays, has no place yet, and lies nowhere that comes later. */
static int oo__waits(const struct oo_plan *plan, const struct oo_laying *lay, size_t turn) {
    const uint32_t unit = plan->turns[turn].unit;
    if (plan->units[unit].place != OO_ANYWHERE)
        return 0;
    const size_t position = oo__position(plan, unit);
    return position == OO_ANYWHERE || position < lay->end;
}

static void oo__lay(struct oo_plan *plan, struct oo_laying *lay, struct oo_plan_unit *unit) {
    unit->place = oo_arena_fit(&plan->arena, lay->end, unit->bytes);
    lay->end = unit->place + unit->bytes;
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

/* Who lies in the arena keeps its own place if others fill what is in front of it. Returns whether
 * most do: what moves has to be copied again. */
static int oo__lay_in_place(struct oo_plan *plan, struct oo_laying lay, size_t *end) {
    size_t begin = 0, kept = 0, moved = 0;
    for (const struct oo_segment *s = plan->arena.segments; s; begin += s->bytes, s = s->next)
        for (const struct oo_block *block = s->first; block; block = block->next) {
            const size_t position = begin + block->offset;
            if (block->unit == OO_NO_UNIT || position < lay.end)
                continue;
            struct oo_plan_unit *unit = &plan->units[block->unit];
            if (unit->round != plan->rounds.number || unit->place != OO_ANYWHERE)
                continue;
            oo__lay_until(plan, &lay, position);
            oo__lay(plan, &lay, unit);
            *(unit->place == position ? &kept : &moved) += unit->bytes;
        }
    *end = lay.end;
    return kept >= 2 * moved;
}

static void oo__unlay(struct oo_plan *plan, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!plan->turns[i].kept)
            plan->units[plan->turns[i].unit].place =
                plan->turns[i].stays ? OO_ANYWHERE : OO_IN_RING;
}

/* Those that stay get their places from `end` on: between training steps in order of use, as these
 * go around them. Returns where the ring begins. */
static size_t oo__lay_from(struct oo_plan *plan, size_t end, size_t count) {
    struct oo_laying lay = {.end = end, .count = count};
    oo__unlay(plan, count);
    if (!plan->rounds.between && !oo__lay_in_place(plan, lay, &lay.end)) {
        lay.end = end;
        oo__unlay(plan, count);
    }
    for (size_t i = 0; i < count; i++)
        if (plan->units[plan->turns[i].unit].place == OO_ANYWHERE)
            oo__lay(plan, &lay, &plan->units[plan->turns[i].unit]);
    return lay.end;
}

/* What lies in the arena stays where it is, but at the end of it, where the ring begins: returned.
 * A ring ends with what a forward used last, which a backward wants first. */
static size_t oo__lay_as_is(struct oo_plan *plan, size_t largest) {
    const size_t total = plan->arena.total_bytes, slots = OO_SLOTS_BETWEEN * largest;
    const size_t most = total - (slots < total / 2 ? slots : total / 2);
    size_t begin = 0, end = 0;
    for (const struct oo_segment *s = plan->arena.segments; s; begin += s->bytes, s = s->next)
        for (const struct oo_block *block = s->first; block; block = block->next)
            if (block->unit != OO_NO_UNIT && begin + block->offset + block->bytes <= most) {
                plan->units[block->unit].place = begin + block->offset;
                end = begin + block->offset + block->bytes;
            }
    return end;
}

/* Mark those that have a place in the arena. */
static void oo__mark_laid(struct oo_plan *plan, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const struct oo_plan_unit *unit = &plan->units[plan->turns[i].unit];
        plan->turns[i].stays = unit->round == plan->rounds.number && unit->place != OO_IN_RING;
        plan->turns[i].kept = 0;
    }
}

/* Each round begins with it, in front of the ring. */
static void oo__find_first(struct oo_plan *plan, size_t count) {
    oo__mark_laid(plan, count);
    const size_t first = oo_round_first(plan->turns, count);
    plan->rounds.first = first < count ? plan->turns[first].unit : OO_NO_UNIT;
}

/* The link's speed, by which rounds are laid; 0: without seconds. */
static double oo__round_bps(const struct oo_plan *plan) {
    return plan->rounds.timed ? oo_plan_link_bps(plan) : 0;
}

/* A ring that is larger than the seconds ask for, as they are known by now, costs bytes: in what it
 * can leave, some that stream stay. Those that stay lie where they lay. */
static void oo__lay_more(struct oo_plan *plan, size_t count, size_t room) {
    struct oo_rounds *rounds = &plan->rounds;
    const double bps = oo__round_bps(plan);
    if (bps <= 0 || rounds->ring >= room)
        return;
    oo__mark_laid(plan, count);
    for (size_t i = 0; i < count; i++)
        plan->turns[i].kept = plan->turns[i].stays;
    const double as_is = oo_round_seconds(plan->turns, count, room - rounds->ring, bps);
    const size_t held = oo_round_settle(plan->turns, count, room, bps, !rounds->between);
    if (oo_round_seconds(plan->turns, count, room - held, bps) <= oo_round_nearly(as_is))
        rounds->ring = oo__lay_from(plan, rounds->ring, count);
    rounds->cursor = rounds->cursor > rounds->ring ? rounds->cursor : rounds->ring;
    oo__find_first(plan, count);
}

/* Whether rounds of those that are spread in `room` take so much less than as they lie that this
 * pays for what has to move: as many bytes as the arena holds, `times` over. Where seconds are new
 * and tell that kernels take all the time, so that the link can move it meanwhile, it is enough
 * that a round copies less. */
static int oo__spread_pays(struct oo_plan *plan, size_t count, size_t ring, size_t room,
                           int times) {
    const struct oo_rounds *rounds = &plan->rounds;
    uint64_t number = rounds->count > rounds->before ? rounds->count : rounds->before;
    const double bps = oo__round_bps(plan), total = (double)plan->arena.total_bytes;
    double as_is_bytes = 0, bytes = 0, kernels_s = 0;
    if (bps <= 0)
        return 1;
    if (!rounds->between && number < OO_ROUNDS_TO_COME)
        number = OO_ROUNDS_TO_COME;
    oo__mark_laid(plan, count);
    for (size_t i = 0; i < count; i++) {
        kernels_s += plan->turns[i].seconds;
        bytes += (double)plan->turns[i].bytes;
        as_is_bytes += plan->turns[i].stays ? 0 : (double)plan->turns[i].bytes;
    }
    const double as_is = oo_round_seconds(plan->turns, count, plan->arena.total_bytes - ring, bps);
    const size_t held = oo_round_settle(plan->turns, count, room, bps, !rounds->between);
    const double spread = oo_round_seconds(plan->turns, count, room - held, bps);
    return (rounds->newly_timed && spread <= oo_round_nearly(kernels_s) &&
            as_is_bytes > oo_round_nearly(bytes - (double)held)) ||
           (as_is > oo_round_nearly(spread) &&
            (as_is - spread) * (double)number > times * total / bps);
}

/* Where a segment ends, what does not fit into it begins in the next one. */
static size_t oo__room_of_round(const struct oo_plan *plan, size_t largest) {
    size_t lost = 0;
    for (const struct oo_segment *s = plan->arena.segments; s && s->next; s = s->next)
        lost += largest;
    return plan->arena.total_bytes > lost ? plan->arena.total_bytes - lost : 0;
}

/* Give each unit of the round that begins after the match a place; `spread`: that is decided. Those
 * of a round that `is_laid` keep theirs unless others pay. Where the arena holds all of them, none
 * needs one. 0: it is none. */
static int oo__lay_round(struct oo_plan *plan, uint64_t visits, int is_laid, int spread) {
    struct oo_rounds *rounds = &plan->rounds;
    size_t total = 0, largest = 0;
    const size_t count = oo__turns(plan, visits);
    for (size_t i = 0; i < count; i++) {
        total += plan->turns[i].bytes;
        largest = plan->turns[i].bytes > largest ? plan->turns[i].bytes : largest;
    }
    if (!count)
        return 0;
    const size_t room = oo__room_of_round(plan, largest);
    oo__guess_seconds(plan->turns, count);
    if (is_laid && rounds->spread) {
        oo__lay_more(plan, count, room);
        if (!oo__spread_pays(plan, count, rounds->ring, room, 1))
            return 1;
    }
    rounds->number++;
    if (plan->home_floor) { /* of those that were spread before: no training came to settle */
        plan->home_floor = 0;
        plan->home_layout = OO_NOWHERE;
    }
    rounds->length = visits;
    rounds->layout = plan->arena.layout;
    rounds->spread = 0;
    for (size_t i = 0; i < count; i++) {
        struct oo_plan_unit *unit = &plan->units[plan->turns[i].unit];
        unit->round = rounds->number;
        unit->place = total <= plan->arena.total_bytes ? OO_ANYWHERE : OO_IN_RING;
    }
    if (total <= plan->arena.total_bytes)
        return 1;
    rounds->ring = oo__lay_as_is(plan, largest);
    /* There, and back to where training wants them. */
    rounds->spread =
        spread || (rounds->many && oo__spread_pays(plan, count, rounds->ring, room, 2));
    if (rounds->spread) {
        (void)oo_round_settle(plan->turns, count, room, oo__round_bps(plan), !rounds->between);
        rounds->ring = oo__lay_from(plan, 0, count);
    }
    rounds->cursor = rounds->ring;
    oo__find_first(plan, count);
    return 1;
}

/* Training after samples: those that are spread stay where they are, but for the last of them, and
 * the homes of all others go around what is behind: two blocks at least. */
static void oo__settle(struct oo_plan *plan) {
    const size_t total = plan->arena.total_bytes, blocks = 2 * plan->block_bytes;
    const size_t room = blocks > total / OO_SHARES ? blocks : total / OO_SHARES;
    plan->home_floor = 0;
    plan->home_layout = OO_NOWHERE;
    for (uint32_t i = 0; plan->rounds.spread && i < plan->n_units; i++) {
        const struct oo_plan_unit *unit = &plan->units[i];
        const size_t end = unit->place + unit->bytes;
        if (unit->round == plan->rounds.number && unit->place < plan->rounds.ring &&
            end + room <= total && end > plan->home_floor)
            plan->home_floor = end;
    }
}

/* Training comes after samples: its forward, where that is recorded, or else its backward. A
 * forward goes as those of the samples did, through their ring. */
static void oo__end_rounds(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    rounds->before = rounds->count;
    /* A unit that is used twice makes a first forward look like two rounds. */
    rounds->over = rounds->between || (rounds->spread && rounds->count > 1);
    rounds->spread_over = rounds->over && rounds->spread;
    rounds->last = 1;
    if (rounds->over)
        oo__settle(plan);
}

/* Backward turns into the next forward. A first backward tells what a block is. */
static void oo__end_step(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    if (rounds->over && plan->arena.total_bytes - plan->home_floor < 2 * plan->block_bytes)
        oo__settle(plan);
    if (rounds->over || plan->relaid)
        plan->stray = 0;
    plan->relaid = 0;
    rounds->over = rounds->spread_over = 0;
}

/* How often there have been as many rounds as are many, doubled each time: who stays is asked anew
 * then, with the seconds that are known by then. 0: too few. */
static int oo__many(const struct oo_rounds *rounds) {
    int many = 0;
    for (uint64_t n = rounds->count > rounds->before ? rounds->count : rounds->before;
         n > OO_MANY_ROUNDS; n /= 2)
        many++;
    return many;
}

/* Whether of all units that were used since this one was before, the seconds were known by then. */
static int oo__all_are_timed(const struct oo_plan *plan, const struct oo_trace_entry *current) {
    return plan->untimed <= current->previous;
}

/* Whether the visits that are expected until this unit's next one are a round: forward, as were as
 * many before. Training's forward is none, as its units are used next in its backward. Between
 * training steps those that are in the arena stay, as the backward to come wants them. To spread
 * them may be worth it for many rounds, as there were the last time. */
static void oo__learn_round(struct oo_plan *plan) {
    struct oo_rounds *rounds = &plan->rounds;
    const struct oo_trace_entry *current = oo__visit_at(plan, plan->now - 1);
    const int was_on = rounds->on;
    rounds->on = 0;
    if (!oo__remembered(plan, plan->match))
        return;
    uint64_t last = plan->match; /* of the unit's visits in a row, one for each member */
    while (oo__visit_at(plan, last)->next == last + 1)
        last++;
    const uint64_t next = oo__visit_at(plan, last)->next, visits = next - plan->match;
    if (next == OO_NOWHERE)
        return;
    rounds->between = current->forwards < plan->now;
    rounds->on = visits < oo__visit_at(plan, next)->forwards && visits < current->forwards;
    if (!rounds->on)
        return;
    const int is_laid =
        plan->units[current->unit].round == rounds->number && rounds->layout == plan->arena.layout;
    rounds->count = (current->forwards - 1) / (is_laid ? rounds->length : visits);
    const int many = oo__many(rounds);
    /* Of samples alone some units may not have been measured yet, where anything is. */
    const int is_timed = (is_laid && rounds->timed) || rounds->between ||
                         rounds->count >= OO_MEASURED_ROUNDS || oo__all_are_timed(plan, current);
    if (is_laid && many == rounds->many && is_timed == rounds->timed && (rounds->spread || was_on))
        return;
    rounds->newly_timed = is_laid && !rounds->between && is_timed && !rounds->timed;
    rounds->timed = is_timed;
    rounds->many = many;
    rounds->on =
        oo__lay_round(plan, visits, is_laid, !rounds->between || (was_on && rounds->spread));
}

static int oo__has_place(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_rounds *rounds = &plan->rounds;
    return (rounds->on || (rounds->last && rounds->layout == plan->arena.layout)) &&
           plan->units[unit].round == rounds->number && plan->units[unit].place != OO_ANYWHERE;
}

/* The position of the unit's place; in the ring, of the place that is next. */
static size_t oo__place(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_rounds *rounds = &plan->rounds;
    const size_t bytes = plan->units[unit].bytes;
    if (plan->units[unit].place != OO_IN_RING)
        return plan->units[unit].place;
    const size_t place = oo_arena_fit(&plan->arena, rounds->cursor, bytes);
    return place >= rounds->cursor && unit != rounds->first
               ? place
               : oo_arena_fit(&plan->arena, rounds->ring, bytes);
}

/* ---- what is needed last ---- */

/* The number of the unit's next visit, where prediction is under way. */
static uint64_t oo__next_visit(const struct oo_plan *plan, uint32_t unit) {
    const uint64_t next = oo_plan_next_use(plan, unit);
    return next == OO_NEVER ? OO_NEVER : plan->match + next;
}

static void oo__furthest_learn(struct oo_plan *plan) {
    oo_furthest_clear(&plan->furthest);
    for (uint32_t unit = 0; unit < plan->n_units; unit++)
        if (plan->units[unit].block)
            oo_furthest_put(&plan->furthest, unit, oo__next_visit(plan, unit));
    plan->furthest_holds = 1;
}

/* The visit at the match has been made: it is no longer ahead. */
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

static uint64_t oo__forwards(const struct oo_plan *plan, enum oo_kind kind) {
    if (!oo__is_forward(kind))
        return 0;
    return plan->now ? oo__visit_at(plan, plan->now - 1)->forwards + 1 : 1;
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
     * whole period, each turn may tell of a better match. */
    const uint64_t expected = plan->match + 1;
    const enum oo_kind before = plan->now > 1 ? oo__visit_at(plan, plan->now - 2)->kind : kind;
    const int turned = oo__is_forward(kind) != oo__is_forward(before);
    if (turned) /* what comes after a backward is expected to be training */
        plan->alike = oo__is_forward(kind);
    const int repeats = oo__remembered(plan, plan->match) && expected < plan->now - 1 &&
                        oo__same_visit(plan, expected, plan->now - 1);
    plan->alike = plan->alike && (repeats || turned);
    /* Within a forward of which some layers are recorded a few units may look like a round. */
    const int is_whole = 2 * plan->rounds.length >= plan->n_homes;
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

void oo_plan_took(struct oo_plan *plan, uint32_t unit, double seconds) {
    struct oo_plan_unit *u = &plan->units[unit];
    const double before_s = u->seconds;
    if (u->removed)
        return; /* what was measured may come late */
    /* Whatever disturbs a measurement makes it longer. */
    const int counts = !u->measured++ || seconds < before_s;
    u->seconds = counts ? seconds : before_s + (seconds - before_s) / 8;
}

void oo_plan_copied(struct oo_plan *plan, size_t bytes, double seconds) {
    plan->copied_bytes = plan->copied_bytes * oo__memory + (double)bytes;
    plan->copied_s = plan->copied_s * oo__memory + seconds;
}

void oo_plan_expect_seconds(struct oo_plan *plan, uint32_t unit, double seconds) {
    if (!plan->units[unit].measured)
        plan->units[unit].seconds = seconds;
}

/* It weighs as one copy does. */
void oo_plan_expect_link(struct oo_plan *plan, double bps) {
    if (plan->copied_s > 0 || !plan->n_units)
        return;
    const size_t bytes = plan->units_bytes / plan->n_units;
    oo_plan_copied(plan, bytes, (double)bytes / bps);
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

double oo_plan_seconds(const struct oo_plan *plan, uint32_t unit) {
    return plan->units[unit].seconds;
}
double oo_plan_link_bps(const struct oo_plan *plan) {
    return plan->copied_s > 0 ? plan->copied_bytes / plan->copied_s : 0;
}

uint64_t oo_plan_first_visit(const struct oo_plan *plan) {
    return plan->now < OO_TRACE ? 0 : plan->now - OO_TRACE + 1;
}
uint64_t oo_plan_end_of_visits(const struct oo_plan *plan) { return plan->now; }
struct oo_visit oo_plan_visit_at(const struct oo_plan *plan, uint64_t number) {
    const struct oo_trace_entry *entry = oo__visit_at(plan, number);
    return (struct oo_visit){entry->unit, entry->kind};
}

/* Nothing to go by yet: forward in order of creation, backward against it; a recompute stays near.
 */
static uint64_t oo__guess_next_use(const struct oo_plan *plan, uint32_t unit) {
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

/* ---- decisions ---- */

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

/* When the unit of predicted visit `index` is used after that. */
static uint64_t oo__use_after(const struct oo_plan *plan, uint64_t index) {
    const struct oo_trace_entry *visit = oo__visit_at(plan, index);
    if (visit->next != OO_NOWHERE)
        return visit->next;
    return plan->match + oo_plan_next_use(plan, visit->unit) +
           (plan->now - 1 - plan->match); /* a period later */
}

/* When the unit of predicted visit `index` is used in the next forward, if that visit is none. */
static uint64_t oo__use_in_next_forward(const struct oo_plan *plan, uint64_t index) {
    for (int i = 0; i < OO_LOOKAHEAD && index < plan->now; i++) {
        if (oo__is_forward_at(plan, index))
            break;
        index = oo__use_after(plan, index);
    }
    return index;
}

/* The unit's first predicted use that is more than `distance` visits from now. */
static uint64_t oo__next_use_after(const struct oo_plan *plan, uint32_t unit, uint64_t distance) {
    uint64_t use = oo_plan_next_use(plan, unit);
    if (!oo__remembered(plan, plan->match))
        return use;
    for (int i = 0; i < OO_LOOKAHEAD && use <= distance && plan->match + use < plan->now; i++)
        use = oo__use_after(plan, plan->match + use) - plan->match;
    return use;
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

/* Whether the unit's home is free for it. FREE: all units that lie there are needed later than the
 * unit is needed `again`, so none of them has to come back during its stay, as in a forward and a
 * backward that mirror each other. FREE_SOON: that will be so once they have been used, which is
 * before the unit is used, `distance` visits from now. BUSY: one of them is needed while the unit
 * would be there (in sampling, where two units share a home, always). */
enum oo_home_state { OO_HOME_FREE, OO_HOME_FREE_SOON, OO_HOME_BUSY };

static enum oo_home_state oo__home_state(struct oo_plan *plan, uint32_t unit, uint64_t distance,
                                         uint64_t again, struct oo_window *window) {
    enum oo_home_state answer = OO_HOME_FREE;
    const size_t home = oo__home(plan, unit);
    if (!oo_arena_window_at(&plan->arena, home, plan->units[unit].bytes, window))
        return OO_HOME_BUSY;
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT && oo__evictable_next_use(plan, block->unit) <= again) {
            if (oo__next_use_after(plan, block->unit, distance) <= again)
                return OO_HOME_BUSY;
            answer = OO_HOME_FREE_SOON;
        }
        if (block == window->last)
            return answer;
    }
}

/* Whether all who lie in the unit's place are used later than that, so that none of them has to
 * come back before it is used. */
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
    if (oo__has_place(plan, unit) &&
        oo__place_is_free(plan, unit, oo__place(plan, unit), 0, window))
        return 1;
    const uint64_t again = oo_plan_next_use(plan, unit);
    return oo__home_state(plan, unit, 0, again, window) == OO_HOME_FREE ||
           oo__find(plan, unit, 0, window);
}

static int oo__wants_fetch(const struct oo_plan *plan, uint32_t unit) {
    const struct oo_plan_unit *u = &plan->units[unit];
    return !u->block && u->ahead && !u->removed;
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

/* Visits from now to the first of the next round, beyond which nothing is fetched: training may
 * come instead. What is spread is not of use to it in any case. */
static uint64_t oo__to_next_round(const struct oo_plan *plan) {
    const uint64_t visits = oo__visit_at(plan, plan->now - 1)->forwards;
    const uint64_t length = plan->rounds.length;
    return plan->rounds.spread ? OO_NEVER : length - (visits - 1) % length;
}

static int oo__fetch_predicted(struct oo_plan *plan, uint32_t *unit, struct oo_window *window) {
    oo__ahead_extend(plan);
    const struct oo_ahead *ahead = &plan->ahead;
    if (ahead->end == plan->now)
        return 0;
    *unit = oo__visit_at(plan, ahead->end)->unit;
    uint64_t distance = ahead->end - plan->match;
    if (oo__has_place(plan, *unit) && oo__is_forward_at(plan, ahead->end))
        return distance <= oo__to_next_round(plan) &&
               oo__place_is_free(plan, *unit, oo__place(plan, *unit), distance, window);
    const size_t pile = oo__pile(plan, ahead->end);
    if (pile != OO_ANYWHERE)
        return oo__place_is_free(plan, *unit, pile, distance, window);
    uint64_t after = oo__use_after(plan, ahead->end);
    /* Who was spread or streamed may lie in a home and be needed before those that have been used.
     */
    if (plan->rounds.spread_over && !oo__is_forward_at(plan, ahead->end))
        after = oo__use_in_next_forward(plan, after);
    const uint64_t again = after - plan->match;
    const int early = ahead->bytes > oo__lead_bytes(plan);
    const enum oo_home_state home = oo__home_state(plan, *unit, distance, again, window);
    if (home == OO_HOME_FREE)
        return 1;
    /* Elsewhere it would only take another unit's place, which then waits in its turn, in this step
     * and in all later ones. In a small arena there is little time to wait. */
    if (home == OO_HOME_FREE_SOON && (early || !oo__is_small(plan)))
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
    } while (!oo__wants_fetch(plan, next));
    *unit = next;
    const uint64_t distance = oo__guess_next_use(plan, next);
    return oo__home_state(plan, next, distance, distance, window) == OO_HOME_FREE ||
           oo__find(plan, next, distance, window);
}

int oo_plan_next_fetch(struct oo_plan *plan, uint32_t *unit, struct oo_window *window) {
    return oo__remembered(plan, plan->match) ? oo__fetch_predicted(plan, unit, window)
                                             : oo__fetch_guessed(plan, unit, window);
}

/* Whether the unit lies where others have their homes, which then would go elsewhere, too. */
static int oo__is_astray(struct oo_plan *plan, uint32_t unit) {
    const size_t position = oo__position(plan, unit);
    return position != OO_ANYWHERE && !plan->units[unit].pins && plan->units[unit].rank &&
           position != oo__home(plan, unit);
}

int oo_plan_next_drop(struct oo_plan *plan, uint32_t *unit) {
    while (plan->stray < plan->n_units) {
        *unit = plan->stray++;
        if (oo__is_astray(plan, *unit))
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
    if (oo__has_place(plan, unit) && plan->units[unit].place == OO_IN_RING)
        plan->rounds.cursor = oo__place(plan, unit) + plan->units[unit].bytes;
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
