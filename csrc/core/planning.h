/* planning.h - what the files of a plan share. Its questions, one file each:
 *
 *   forecast.c  when is each unit used next, and how long does that take?
 *   stays.c     which units stay in the arena while samples stream? For one round: round.c.
 *   places.c    where is it in the arena?
 *   fetch.c     what is fetched next, and what leaves for it? Among many units: furthest.c.
 *   plan.c      a use, which asks them in turn.
 *
 * Where a unit will be is its place, a position in the arena: on the tape, in a pile, or in a
 * round.
 *
 * A comment at each constant says what chose it, or that nothing has been measured. "Time" and
 * "bytes" are those of sampling by their bound and their least, on average over the cells of
 * `python benchmarks/simulated.py --cells ci`: 1.017 and 1.016; "first sweeps" the time of all 23
 * sweeps after the first, 1.049. Training is the same with every value that is named. */
#ifndef OO_PLANNING_H
#define OO_PLANNING_H

#include "furthest.h"
#include "plan.h"
#include "round.h"

/* Visits remembered. A step of a model with 1,000 units is 3,000 visits; the match needs one
 * earlier period and the current one. */
enum { OO_TRACE_BITS = 16, OO_TRACE = 1 << OO_TRACE_BITS, OO_TRACE_MASK = OO_TRACE - 1 };
_Static_assert(2 * OO_MAX_EXPECTED <= OO_TRACE, "what is expected is remembered twice");
#define OO_NOWHERE UINT64_MAX /* an index into the trace that is none */

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
    uint64_t last;      /* index of its latest visit */
    uint64_t mark;      /* scratch: the walk over the trace that has met it */
    size_t tape_place;  /* where it is by the order of a forward */
    size_t pile_place;  /* in a backward, where piles count; OO_ANYWHERE: it is in none */
    size_t round_place; /* in `round`: a position, OO_IN_RING or OO_ANYWHERE */
    uint32_t rank;      /* its number on the tape, from 1; 0: it is not there */
    uint64_t round;     /* the latest one laid with it */
    double seconds;     /* of a forward, until the next visit; 0: not known */
    uint32_t measured;  /* so often */
    uint32_t begun;     /* so many measurements, which end later */
    uint32_t pins;
    uint64_t since; /* visits before its first pin */
    uint8_t ahead, removed;
    uint8_t far;   /* on a disk */
    uint8_t tape;  /* which it is on */
    uint8_t stays; /* in use while others come and go, as what is lent to a whole model is */
};

/* Units that are used in turn, over and over: those that stay are in front, the others stream
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
    uint32_t first;  /* of the units that are in it, in each round */
};

struct oo_plan {
    struct oo_arena arena;
    struct oo_plan_unit *units;
    uint32_t n_units, capacity;
    struct oo_trace_entry *trace; /* ring: visit i at i & OO_TRACE_MASK */
    uint64_t now;                 /* visits so far; the current one is now - 1 */
    uint64_t expected;            /* those before this one were another run's */
    uint64_t untimed;             /* those behind this one were of units with seconds */
    uint64_t match;              /* an earlier visit after which the future is expected to repeat */
    uint64_t confirmed;          /* for so many visits it has */
    int alike;                   /* for now, recorded forwards and others count as one kind */
    struct oo_ahead ahead[2];    /* of what goes to either tape */
    struct oo_furthest furthest; /* what is in the arena, by the visits that are predicted */
    int furthest_holds;          /* they still are */
    uint64_t longest_block;      /* in visits: shorter ones need no counting */
    size_t block_bytes;
    uint64_t marks; /* walks over the trace so far */
    uint32_t *tape; /* units, in order */
    uint32_t n_tape;
    uint64_t tape_layout; /* the arena's layout that their places were given in */
    size_t tape_floor;    /* of all laps: those that samples have spread are in front of it */
    struct oo_tape {
        size_t begin; /* of a lap but the first: behind what stays */
        size_t limit; /* of all laps */
        size_t end;   /* where the next place may begin */
    } tapes[2];
    int parted;           /* the first is of what is in memory, the second of what is on a disk */
    int relaid;           /* it was, clear of what stays: some may be elsewhere */
    uint32_t misplaced;   /* units before this one have left if they were elsewhere */
    uint64_t pile_layout; /* the arena's layout that piles count in */
    struct oo_rounds rounds;
    struct oo_turn *turns; /* scratch */
    struct oo_copied {
        double bytes, seconds;
    } copied[2];        /* the latest copies: from memory, and from a disk */
    size_t units_bytes; /* all units that there are */
    uint64_t allocations;
};

static inline const struct oo_trace_entry *oo__visit_at(const struct oo_plan *plan,
                                                        uint64_t index) {
    return &plan->trace[index & OO_TRACE_MASK];
}

static inline int oo__remembered(const struct oo_plan *plan, uint64_t index) {
    return index != OO_NOWHERE && index + OO_TRACE > plan->now;
}

static inline int oo__is_forward(enum oo_kind kind) {
    return kind == OO_FORWARD || kind == OO_RECORDED;
}

static inline int oo__is_forward_at(const struct oo_plan *plan, uint64_t index) {
    return oo__is_forward(oo__visit_at(plan, index)->kind);
}

/* What is ahead has to be looked for again. */
static inline void oo__ahead_reset(struct oo_plan *plan) {
    plan->ahead[0].end = plan->ahead[1].end = 0;
}

/* ---- forecast.c ---- */

/* Whether two visits are of one unit and of one kind. */
int oo__same_visit(const struct oo_plan *plan, uint64_t a, uint64_t b);
/* Among earlier visits like the current one, the one preceded by the longest equal past; of equals
 * the latest, so that the period is the shortest that explains what was seen. But where what
 * followed the two before it was the same for longer, as in training that was interrupted by
 * samples, the latest is the exception, and the one before it the rule. */
uint64_t oo__find_match(const struct oo_plan *plan);
/* The unit of visit `index`, if the walk that began with `marks++` had not met it before. */
struct oo_plan_unit *oo__first_met(struct oo_plan *plan, uint64_t index);
/* A unit's backward follows its recompute within one checkpointed block: the distinct bytes used in
 * between are what the arena must hold for recompute and backward to share one stay. */
void oo__learn_block(struct oo_plan *plan);
/* Visits that are forward, without a break, up to one of this kind now. */
uint64_t oo__forwards(const struct oo_plan *plan, enum oo_kind kind);
/* Whether of all units that were used since this one was before, the seconds were known by then. */
int oo__all_are_timed(const struct oo_plan *plan, const struct oo_trace_entry *current);
/* As oo_plan_link_bps, of what is read from a disk. */
double oo__disk_bps(const struct oo_plan *plan);
/* Nothing to go by yet: forward in order of creation, backward against it; a recompute stays near.
 */
uint64_t oo__guess_next_use(const struct oo_plan *plan, uint32_t unit);
/* The number of the unit's next visit, where prediction is under way. */
uint64_t oo__next_visit(const struct oo_plan *plan, uint32_t unit);
/* When the unit of predicted visit `index` is used after that. */
uint64_t oo__use_after(const struct oo_plan *plan, uint64_t index);
/* When the unit of predicted visit `index` is used in the next forward, if that visit is none. */
uint64_t oo__use_in_next_forward(const struct oo_plan *plan, uint64_t index);
/* The unit's first predicted use that is more than `distance` visits from now. */
uint64_t oo__next_use_after(const struct oo_plan *plan, uint32_t unit, uint64_t distance);

/* ---- places.c ---- */

/* Samples have spread it, and training leaves it there. */
int oo__is_settled(const struct oo_plan *plan, const struct oo_plan_unit *unit);
/* Give the places on the tape again, where the arena is another one. */
void oo__learn_tape(struct oo_plan *plan);
/* Where a unit is by the order of a forward; it is the last one if it was not on the tape. */
size_t oo__tape_place(struct oo_plan *plan, uint32_t id);
/* Forward turns into backward: give places on the tape in the order of the forward that has just
 * ended. Units keep their places as long as that order only skips units. */
void oo__learn_order(struct oo_plan *plan);
/* Fewer than two blocks fit next to each other. */
int oo__is_small(const struct oo_plan *plan);
/* Backward turns into the next forward: make the piles that the one that has just ended calls for,
 * in an arena that holds a block, and not two. */
void oo__learn_piles(struct oo_plan *plan);
/* Where a predicted visit wants its unit if in a pile; OO_ANYWHERE: in none. */
size_t oo__pile_place(const struct oo_plan *plan, uint64_t index);
/* Those that stay get their places from `end` on: between training steps in order of use, as these
 * go around them. Returns where the ring begins. */
size_t oo__lay_from(struct oo_plan *plan, size_t end, size_t count);
/* What is in the arena stays where it is, but at the end of it, where the ring begins: returned. A
 * ring ends with what a forward used last, which a backward wants first. */
size_t oo__lay_as_is(struct oo_plan *plan, size_t largest);
/* Whether a round, or training's forward right after it, has a place for the unit. */
int oo__has_round_place(const struct oo_plan *plan, uint32_t unit);
/* The position of the unit's place; in the ring, of the place that is next. */
size_t oo__round_place(const struct oo_plan *plan, uint32_t unit);
/* Whether the unit is where others have their places, which then would go elsewhere, too. */
int oo__is_misplaced(struct oo_plan *plan, uint32_t unit);

/* ---- stays.c ---- */

/* Whether the visits that are expected until this unit's next one are a round: forward, as were as
 * many before. Training's forward is none, as its units are used next in its backward. Between
 * training steps those that are in the arena stay, as the backward to come wants them. To spread
 * them may be worth it for many rounds, as there were the last time. */
void oo__learn_round(struct oo_plan *plan);
/* Training comes after samples: its forward, where that is recorded, or else its backward. A
 * forward goes as those of the samples did, through their ring. */
void oo__end_rounds(struct oo_plan *plan);
/* Backward turns into the next forward. A first backward shows what a block is. */
void oo__end_step(struct oo_plan *plan);

/* ---- fetch.c ---- */

/* The visit at the match has been made: it is no longer ahead. */
void oo__ahead_pass(struct oo_plan *plan);

#endif
