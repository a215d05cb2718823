/* The planner alone: bytes against their lower bound, on real shapes and on random traces. */
#include "check.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_UNITS = 4096, MAX_VISITS = 16384, MAX_BLOCKS = 600 };

struct visit {
    uint32_t unit;
    enum oo_kind kind;
};

struct model {
    size_t bytes[MAX_UNITS], total, largest, block;
    unsigned n, n_blocks, block_begin[MAX_BLOCKS + 1];
    struct visit step[MAX_VISITS];
    unsigned n_visits;
};

static size_t aligned(size_t bytes) {
    return (bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
}

static void add_block(struct model *m, const unsigned *h2_units, unsigned n, size_t hidden) {
    size_t bytes = 0;
    m->block_begin[m->n_blocks++] = m->n;
    for (unsigned i = 0; i < n; i++) {
        const size_t leaf = aligned(h2_units[i] * hidden * hidden * 2);
        m->bytes[m->n++] = leaf;
        bytes += leaf;
        if (leaf > m->largest)
            m->largest = leaf;
    }
    m->total += bytes;
    if (bytes > m->block)
        m->block = bytes;
}

/* Double blocks of 36 h^2 parameters and single blocks of 15 h^2, leaf by leaf. */
static void flux_of_blocks(struct model *m, int twins, int singles, size_t hidden,
                           int checkpointed) {
    static const unsigned twin[] = {6, 6, 3, 3, 1, 1, 4, 4, 4, 4}, single[] = {3, 3, 4, 5};
    *m = (struct model){0};
    for (int i = 0; i < twins; i++)
        add_block(m, twin, 10, hidden);
    for (int i = 0; i < singles; i++)
        add_block(m, single, 4, hidden);
    m->block_begin[m->n_blocks] = m->n;
    for (unsigned u = 0; u < m->n; u++)
        m->step[m->n_visits++] = (struct visit){u, OO_FORWARD};
    for (unsigned b = m->n_blocks; b-- > 0;) {
        for (unsigned u = m->block_begin[b]; checkpointed && u < m->block_begin[b + 1]; u++)
            m->step[m->n_visits++] = (struct visit){u, OO_RECOMPUTE};
        for (unsigned u = m->block_begin[b + 1]; u-- > m->block_begin[b];)
            m->step[m->n_visits++] = (struct visit){u, OO_BACKWARD};
    }
}

/* FLUX.1 has 19 and 38. */
static void flux_of(struct model *m, int depth, size_t hidden, int checkpointed) {
    flux_of_blocks(m, 19 * depth, 38 * depth, hidden, checkpointed);
}

static void flux(struct model *m, size_t hidden, int checkpointed) {
    flux_of(m, 1, hidden, checkpointed);
}

static void add_segment(struct oo_plan *plan, uintptr_t address, size_t bytes) {
    struct oo_segment *segment;
    CHECK(oo_arena_add(oo_plan_arena(plan), address, bytes, 0, 0, &segment) == OO_OK, "segment");
}

static struct oo_plan *plan_of(const struct model *m, size_t capacity) {
    struct oo_plan *plan;
    uint32_t unit;
    CHECK(oo_plan_create(&plan) == OO_OK, "plan");
    for (unsigned i = 0; i < m->n; i++)
        CHECK(oo_plan_unit_add(plan, m->bytes[i], &unit) == OO_OK && unit == i, "unit %u", i);
    add_segment(plan, 1 << 20, capacity);
    return plan;
}

struct outcome {
    size_t bytes;
    unsigned late;
};

/* Visit in order, carrying out at once what the plan decides. */
static struct outcome run(struct oo_plan *plan, const struct model *m, const struct visit *visits,
                          unsigned n) {
    struct outcome outcome = {0, 0};
    for (unsigned i = 0; i < n; i++) {
        const uint32_t unit = visits[i].unit;
        struct oo_window window;
        uint32_t fetch;
        oo_plan_visit(plan, unit, visits[i].kind);
        if (!oo_plan_resident(plan, unit)) {
            const int placed = oo_plan_place(plan, unit, &window);
            CHECK(placed, "no place for unit %u", unit);
            if (!placed)
                return outcome;
            oo_plan_take(plan, unit, &window);
            outcome.bytes += m->bytes[unit];
            outcome.late++;
        }
        oo_plan_pin(plan, unit);
        oo_plan_unpin(plan, unit);
        while (oo_plan_next_drop(plan, &fetch))
            oo_plan_drop(plan, fetch);
        while (oo_plan_next_fetch(plan, OO_TAPES, &fetch, &window)) {
            oo_plan_take(plan, fetch, &window);
            outcome.bytes += m->bytes[fetch];
        }
    }
    return outcome;
}

/* The last of so many times. */
static struct outcome repeat(struct oo_plan *plan, const struct model *m,
                             const struct visit *visits, unsigned n, unsigned times) {
    struct outcome last = {0, 0};
    while (times-- > 0)
        last = run(plan, m, visits, n);
    return last;
}

static size_t x_min(const struct model *m, size_t capacity) {
    return capacity < m->total ? 2 * (m->total - capacity) : 0;
}

CASE(test_bytes_per_step_stay_near_the_lower_bound) {
    static struct model m;
    for (int checkpointed = 0; checkpointed < 2; checkpointed++) {
        flux(&m, 3072, checkpointed);
        for (int percent = 0; percent <= 100; percent += 5) {
            const size_t floor = m.block > 2 * m.largest ? m.block : 2 * m.largest;
            const size_t capacity = aligned(m.total / 100 * (size_t)(100 - percent) + floor);
            struct oo_plan *plan = plan_of(&m, capacity);
            run(plan, &m, m.step, m.n_visits);
            struct outcome o = {0, 0};
            for (int step = 0; step < 4; step++) {
                o = run(plan, &m, m.step, m.n_visits);
                /* Below 15% the bound is so small that a single unit, which is not divisible,
                 * counts. */
                const size_t unit = percent < 15 ? m.largest : 0;
                CHECK(o.bytes <= x_min(&m, capacity) / 1000 * 1025 + unit,
                      "%d%% offloaded, checkpoints %d: %zu bytes, bound %zu", percent, checkpointed,
                      o.bytes, x_min(&m, capacity));
                CHECK(o.late == 0, "%u late copies with %d%% offloaded", o.late, percent);
            }
            if (x_min(&m, capacity))
                printf("%3d%% offloaded, checkpoints %d: %.3f X_min a step\n", percent,
                       checkpointed, (double)o.bytes / (double)x_min(&m, capacity));
            if (checkpointed)
                CHECK(oo_plan_block_bytes(plan) == m.block, "block %zu learned as %zu", m.block,
                      oo_plan_block_bytes(plan));
            oo_plan_destroy(plan);
        }
    }
}

/* Bytes of the last of `steps`, and whether each unit came back to where it was in the step before.
 */
static struct outcome settle(struct oo_plan *plan, const struct model *m, int steps,
                             unsigned *moved) {
    static uintptr_t address[MAX_UNITS], before[MAX_UNITS];
    struct outcome last = {0, 0};
    for (int step = 0; step < steps; step++) {
        last = (struct outcome){0, 0};
        memcpy(before, address, sizeof before);
        for (unsigned i = 0; i < m->n_visits; i++) {
            const struct outcome one = run(plan, m, m->step + i, 1);
            const uint32_t unit = m->step[i].unit;
            last.bytes += one.bytes;
            last.late += one.late;
            if (oo_plan_resident(plan, unit)) /* else it has made place already */
                address[unit] = oo_block_address(oo_plan_resident(plan, unit));
        }
    }
    *moved = 0;
    for (unsigned i = 0; i < m->n; i++)
        *moved += address[i] != before[i];
    return last;
}

/* The order of creation is another than that of execution, which is learned at the first turn. */
CASE(test_units_created_in_another_order_than_they_run) {
    static struct model m;
    uint32_t other[MAX_UNITS];
    size_t bytes[MAX_UNITS];
    unsigned moved;
    flux(&m, 3072, 1);
    srand(5);
    for (unsigned i = 0; i < m.n; i++)
        other[i] = i;
    for (unsigned i = m.n - 1; i > 0; i--) {
        const unsigned k = (unsigned)rand() % (i + 1);
        const uint32_t swapped = other[i];
        other[i] = other[k];
        other[k] = swapped;
    }
    memcpy(bytes, m.bytes, sizeof bytes);
    for (unsigned i = 0; i < m.n; i++)
        m.bytes[other[i]] = bytes[i];
    for (unsigned i = 0; i < m.n_visits; i++)
        m.step[i].unit = other[m.step[i].unit];
    for (int percent = 50; percent <= 90; percent += 10) {
        const size_t capacity = aligned(m.total / 100 * (size_t)(100 - percent) + m.block);
        struct oo_plan *plan = plan_of(&m, capacity);
        const struct outcome o = settle(plan, &m, 5, &moved);
        CHECK(o.bytes <= x_min(&m, capacity) / 1000 * 1010 && o.late == 0,
              "%d%%: %zu bytes, bound %zu; %u late", percent, o.bytes, x_min(&m, capacity), o.late);
        CHECK(moved * 50 <= m.n, "%d%%: %u units moved", percent, moved);
        oo_plan_destroy(plan);
    }
}

/* Homes go through all segments; what is left over at the ends of segments is not lost. */
CASE(test_several_segments_are_nearly_as_good_as_one) {
    static struct model m;
    unsigned moved;
    flux(&m, 3072, 1);
    for (int percent = 20; percent <= 80; percent += 20) {
        const size_t capacity = aligned(m.total / 100 * (size_t)(100 - percent) + m.block);
        struct oo_plan *plan = plan_of(&m, aligned(capacity / 2));
        const struct outcome half = settle(plan, &m, 3, &moved);
        CHECK(moved == 0, "%d%%: %u units moved", percent, moved);
        /* The arena grows while training goes on: places are assigned again. */
        for (unsigned i = 1; i < 3; i++)
            add_segment(plan, (uintptr_t)i << 40, aligned(capacity / 4));
        const struct outcome o = settle(plan, &m, 6, &moved);
        CHECK(o.bytes < half.bytes && o.bytes <= x_min(&m, capacity) / 100 * 105,
              "%d%%: %zu bytes, bound %zu", percent, o.bytes, x_min(&m, capacity));
        CHECK(o.late == 0, "%d%%: %u late copies", percent, o.late);
        oo_plan_destroy(plan);
    }
}

/* The arena grows to a checkpointed block by the difference, in a segment of its own next to the
 * first one. */
CASE(test_a_difference_is_nearly_as_good_as_one_segment) {
    static struct model m;
    unsigned moved;
    for (int hidden = 1024; hidden <= 3072; hidden += 1024) {
        flux(&m, (size_t)hidden, 1);
        for (int percent = 10; percent <= 100; percent += 10) {
            const size_t before = aligned(m.total / 100 * (size_t)(100 - percent)) + 2 * m.largest;
            const size_t needed = m.block - 2 * m.largest;
            const size_t difference = needed > 2 * m.largest ? needed : 2 * m.largest;
            struct oo_plan *plan = plan_of(&m, before), *one = plan_of(&m, before + difference);
            settle(plan, &m, 3, &moved);
            add_segment(plan, (uintptr_t)1 << 40, difference);
            const struct outcome grown = settle(plan, &m, 6, &moved),
                                 whole = settle(one, &m, 6, &moved);
            printf("%d wide, %d%% offloaded: %+.2f units\n", hidden, percent,
                   ((double)grown.bytes - (double)whole.bytes) / (double)m.largest);
            CHECK(grown.bytes <= whole.bytes + 2 * m.largest,
                  "%d wide, %d%% offloaded: %zu bytes, %zu in one segment", hidden, percent,
                  grown.bytes, whole.bytes);
            CHECK(grown.late == 0, "%d%%: %u late copies", percent, grown.late);
            oo_plan_destroy(plan);
            oo_plan_destroy(one);
        }
    }
}

/* The weights of a model that is gone leave no gaps between the places of the others. */
CASE(test_places_close_up_when_units_are_removed) {
    static struct model m, both;
    unsigned moved;
    flux(&m, 3072, 1);
    both = (struct model){.n = 2 * m.n, .n_visits = 2 * m.n_visits};
    for (unsigned i = 0; i < both.n; i++)
        both.bytes[i] = m.bytes[i % m.n];
    for (unsigned i = 0; i < both.n_visits; i++) { /* two models take turns, layer by layer */
        both.step[i] = m.step[i / 2];
        both.step[i].unit += i % 2 * m.n;
    }
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&both, capacity);
    repeat(plan, &both, both.step, both.n_visits, 3);
    for (uint32_t unit = m.n; unit < both.n; unit++) {
        oo_plan_drop(plan, unit);
        oo_plan_unit_remove(plan, unit);
    }
    const struct outcome o = settle(plan, &m, 6, &moved);
    CHECK(o.bytes <= x_min(&m, capacity) / 1000 * 1010 && o.late == 0, "%zu bytes, bound %zu",
          o.bytes, x_min(&m, capacity));
    oo_plan_destroy(plan);
}

/* Sampling visits 0..L-1 over and over: keeping c units, the best possible is about L - c loads. */
CASE(test_sampling_does_not_degenerate_to_loading_everything) {
    static struct model m;
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity);
    run(plan, &m, m.step, m.n);
    run(plan, &m, m.step, m.n);
    for (int sweep = 0; sweep < 4; sweep++) {
        const struct outcome o = run(plan, &m, m.step, m.n);
        CHECK(o.bytes * 100 <= (m.total - capacity) * 110, "a sweep loads %zu of %zu bytes",
              o.bytes, m.total);
        CHECK(o.late == 0, "%u late copies", o.late);
    }
    /* Back to training: what the change costs is bounded, and it heals within a step. */
    run(plan, &m, m.step, m.n_visits);
    const struct outcome healed = run(plan, &m, m.step, m.n_visits);
    CHECK(healed.bytes * 100 <= x_min(&m, capacity) * 110 && healed.late <= 1, "%zu bytes, %u late",
          healed.bytes, healed.late);
    oo_plan_destroy(plan);
}

enum { LINK_BPS = 1000000000 };

struct clocks {
    double used_s[MAX_UNITS], arrived_s[MAX_UNITS], gpu_s, link_s;
};

/* A copy begins when the one before it has ended and what was in its place has been used. */
static void timed_copy(struct oo_plan *plan, const struct model *m, struct clocks *c, uint32_t unit,
                       const struct oo_window *window) {
    for (const struct oo_block *block = window->first;; block = block->next) {
        if (block->unit != OO_NO_UNIT && c->used_s[block->unit] > c->link_s)
            c->link_s = c->used_s[block->unit];
        if (block == window->last)
            break;
    }
    oo_plan_take(plan, unit, window);
    c->link_s += (double)m->bytes[unit] / LINK_BPS;
    c->arrived_s[unit] = c->link_s;
}

struct step {
    double seconds;
    size_t bytes;
};

/* The first `n` visits of a step; `kernels_s[unit]` of a visit. */
static struct step timed_round_of(struct oo_plan *plan, const struct model *m, struct clocks *c,
                                  unsigned n, const double *kernels_s) {
    const double begin_s = c->gpu_s;
    struct step round = {0, 0};
    for (unsigned i = 0; i < n; i++) {
        const uint32_t unit = m->step[i].unit;
        struct oo_window window;
        uint32_t fetch;
        oo_plan_visit(plan, unit, m->step[i].kind);
        if (!oo_plan_resident(plan, unit) && oo_plan_place(plan, unit, &window)) {
            timed_copy(plan, m, c, unit, &window);
            round.bytes += m->bytes[unit];
        }
        c->gpu_s = c->arrived_s[unit] > c->gpu_s ? c->arrived_s[unit] : c->gpu_s;
        c->gpu_s += kernels_s[unit];
        c->used_s[unit] = c->gpu_s;
        while (oo_plan_next_drop(plan, &fetch))
            oo_plan_drop(plan, fetch);
        while (oo_plan_next_fetch(plan, OO_TAPES, &fetch, &window)) {
            timed_copy(plan, m, c, fetch, &window);
            round.bytes += m->bytes[fetch];
        }
    }
    round.seconds = c->gpu_s - begin_s;
    return round;
}

/* Kernels take as long as copies of a fifth of their weights. */
static struct step timed_round(struct oo_plan *plan, const struct model *m, struct clocks *c,
                               unsigned n) {
    static double kernels_s[MAX_UNITS];
    for (unsigned unit = 0; unit < m->n; unit++)
        kernels_s[unit] = 0.2 * (double)m->bytes[unit] / LINK_BPS;
    return timed_round_of(plan, m, c, n, kernels_s);
}

/* The last of so many. */
static struct step timed_rounds(struct oo_plan *plan, const struct model *m, struct clocks *c,
                                unsigned n, unsigned times) {
    struct step last = {0, 0};
    while (times-- > 0)
        last = timed_round(plan, m, c, n);
    return last;
}

/* What was measured of the link, and of all units. */
static void know(struct oo_plan *plan, const struct model *m, double seconds_per_byte) {
    for (unsigned unit = 0; unit < m->n; unit++)
        oo_plan_took(plan, unit, (double)m->bytes[unit] * seconds_per_byte);
    oo_plan_copied(plan, 0, 3000, 3000.0 / LINK_BPS);
}

/* The last of some steps. */
static struct step timed_step_of(struct oo_plan *plan, const struct model *m) {
    static struct clocks c;
    struct step last = {0, 0};
    c = (struct clocks){0};
    last = timed_rounds(plan, m, &c, m->n_visits, 5);
    oo_plan_destroy(plan);
    return last;
}

static struct step timed_step(const struct model *m, size_t capacity) {
    return timed_step_of(plan_of(m, capacity), m);
}

/* In an arena of two segments. */
static struct step timed_step_in_two(const struct model *m, size_t first, size_t second) {
    struct oo_plan *plan = plan_of(m, first);
    add_segment(plan, (uintptr_t)1 << 40, second);
    return timed_step_of(plan, m);
}

/* A fetch whose place is free only after other uses waits for it, and all later ones behind it.
 * That costs little as long as all are in place: where one is not, it has taken another's place (up
 * to 1.22 where free room is anybody's). */
CASE(test_a_slow_link_does_not_rest) {
    static struct model m;
    double sum = 0;
    int n = 0;
    flux(&m, 3072, 1);
    for (int percent = 20; percent <= 60; percent++, n++) {
        const size_t capacity = aligned(m.total / 100 * (size_t)percent);
        const double copies_s = (double)x_min(&m, capacity) / LINK_BPS;
        const struct step step = timed_step(&m, capacity);
        printf("%d%% resident: %.3f of the copies' seconds, %.4f of X_min\n", percent,
               step.seconds / copies_s, (double)step.bytes / (double)x_min(&m, capacity));
        CHECK(step.seconds <= 1.035 * copies_s, "%d%% resident", percent);
        CHECK(step.bytes <= x_min(&m, capacity) / 1000 * 1010, "%d%% resident", percent);
        sum += step.seconds / copies_s;
    }
    printf("on average %.4f\n", sum / n);
    CHECK(sum / n <= 1.018, "on average %.4f", sum / n);
}

/* What stays in use for a whole forward, as what a model's own forward computes with does, delays
 * no other unit: no unit has its place there (else up to 1.43, on average 1.14), and a unit in
 * another's place leaves (else up to 1.39). */
CASE(test_what_stays_in_use_holds_nobody_up) {
    static struct model m, backward;
    static struct clocks c;
    double sum = 0;
    int n = 0;
    flux(&m, 3072, 1);
    backward = m;
    backward.n_visits = m.n_visits - m.n;
    memmove(backward.step, m.step + m.n, backward.n_visits * sizeof *m.step);
    for (int percent = 20; percent <= 60; percent += 5, n++) {
        const size_t capacity = aligned(m.total / 100 * (size_t)percent);
        struct oo_plan *plan = plan_of(&m, capacity);
        double step_s = 0;
        size_t bytes = 0;
        c = (struct clocks){0};
        for (int step = 0; step < 5; step++) {
            oo_plan_pin(plan, 0);
            const struct step forward = timed_round(plan, &m, &c, m.n);
            oo_plan_unpin(plan, 0);
            const struct step rest = timed_round(plan, &backward, &c, backward.n_visits);
            step_s = forward.seconds + rest.seconds;
            bytes = forward.bytes + rest.bytes;
        }
        const double ratio = step_s * LINK_BPS / (double)x_min(&m, capacity);
        printf("%d%% resident: %.3f of the copies' seconds, %.4f of X_min\n", percent, ratio,
               (double)bytes / (double)x_min(&m, capacity));
        CHECK(ratio <= 1.035, "%d%% resident: %.4f", percent, ratio);
        sum += ratio;
        oo_plan_destroy(plan);
    }
    printf("on average %.4f\n", sum / n);
    CHECK(sum / n <= 1.018, "on average %.4f", sum / n);
}

/* Whatever disturbs a measurement makes it longer. What is expected counts until there is one, and
 * what was measured of a unit that is gone by now, never. */
CASE(test_the_least_that_was_measured_counts) {
    static struct model m;
    static const struct {
        double took_s, known_s;
    } cases[] = {{9, 9}, {1.5, 1.5}, {3.5, 1.75}, {1.5, 1.5}};
    flux(&m, 64, 0);
    struct oo_plan *plan = plan_of(&m, aligned(m.total));
    oo_plan_expect_seconds(plan, 1, 2);
    CHECK(oo_plan_seconds(plan, 1) <= 2 && oo_plan_seconds(plan, 1) >= 2, "what is expected");
    for (size_t i = 0; i < CHECK_COUNT(cases); i++) {
        const double known_s = cases[i].known_s;
        oo_plan_took(plan, 1, cases[i].took_s);
        oo_plan_expect_seconds(plan, 1, 4);
        CHECK(oo_plan_seconds(plan, 1) <= known_s && oo_plan_seconds(plan, 1) >= known_s,
              "case %zu: %f s", i, oo_plan_seconds(plan, 1));
    }
    oo_plan_unit_remove(plan, 1);
    oo_plan_took(plan, 1, 1);
    CHECK(oo_plan_seconds(plan, 1) <= 0, "of a unit that is gone");
    oo_plan_destroy(plan);
}

/* A step whose blocks are visited by `batches` micro-batches in turn, each by as many visits in a
 * row as its unit has members. */
static void interleave(struct model *m, unsigned batches, unsigned members) {
    m->n_visits = 0;
    for (unsigned b = 0; b < m->n_blocks; b++)
        for (unsigned i = 0; i < batches; i++)
            for (unsigned u = m->block_begin[b]; u < m->block_begin[b + 1]; u++)
                for (unsigned k = 0; k <= u % members; k++)
                    m->step[m->n_visits++] = (struct visit){u, OO_FORWARD};
    for (unsigned b = m->n_blocks; b-- > 0;)
        for (unsigned i = 0; i < batches; i++) {
            for (unsigned u = m->block_begin[b]; u < m->block_begin[b + 1]; u++)
                for (unsigned k = 0; k <= u % members; k++)
                    m->step[m->n_visits++] = (struct visit){u, OO_RECOMPUTE};
            for (unsigned u = m->block_begin[b + 1]; u-- > m->block_begin[b];)
                for (unsigned k = 0; k <= u % members; k++)
                    m->step[m->n_visits++] = (struct visit){u, OO_BACKWARD};
        }
}

/* In an arena of less than two blocks, a block comes in for its backward as far as the one before
 * it has gone, whatever is known of seconds: in the places of the forward, copies would wait until
 * all of it has (4.21, 4.21, 6.47 and 4.41). */
CASE(test_blocks_pile_up_in_a_backward) {
    static struct model m;
    static const struct {
        unsigned batches, members, segments;
        double most; /* seconds of four arenas, by their copies' */
    } shapes[] = {{1, 1, 1, 4.09}, {1, 1, 2, 4.09}, {4, 1, 1, 6.05}, {1, 3, 1, 4.16}};
    for (size_t shape = 0; shape < CHECK_COUNT(shapes); shape++) {
        double sum = 0;
        for (int quarters = 4; quarters < 8; quarters++) {
            flux(&m, 3072, 1);
            interleave(&m, shapes[shape].batches, shapes[shape].members);
            const size_t capacity = aligned(m.block / 4 * (size_t)quarters);
            const struct step step =
                shapes[shape].segments == 2
                    ? timed_step_in_two(&m, m.block / 2, capacity - m.block / 2)
                    : timed_step(&m, capacity);
            const double seconds = step.seconds * LINK_BPS / (double)x_min(&m, capacity),
                         bytes = (double)step.bytes / (double)x_min(&m, capacity);
            printf("%.2f blocks, %u micro-batches, up to %u members, %u segments: %.3f of the "
                   "copies' seconds, %.4f of X_min\n",
                   quarters / 4.0, shapes[shape].batches, shapes[shape].members,
                   shapes[shape].segments, seconds, bytes);
            CHECK(bytes <= 1.006, "%d quarters, shape %zu: %.4f", quarters, shape, bytes);
            sum += seconds;
        }
        CHECK(sum <= shapes[shape].most, "shape %zu: %.3f of the copies' seconds", shape, sum);
    }
}

/* FLUX.2's blocks, in segments that hold them only with their units in another order: the places of
 * the forward waste less than piles that some units find no room in (1.168). */
CASE(test_no_piles_where_a_block_finds_no_room) {
    static struct model m;
    static const unsigned twin[] = {1, 1, 1, 1, 1, 1, 1, 1, 6, 3, 6, 3}, single[] = {9, 4};
    m = (struct model){0};
    for (int i = 0; i < 8; i++)
        add_block(&m, twin, 12, 1024);
    for (int i = 0; i < 48; i++)
        add_block(&m, single, 2, 1024);
    m.block_begin[m.n_blocks] = m.n;
    interleave(&m, 1, 1);
    const size_t first = aligned(m.block / 100 * 34);
    const struct step step = timed_step_in_two(&m, first, m.block - first);
    const double bytes = (double)step.bytes / (double)x_min(&m, m.block);
    printf("%.4f of X_min\n", bytes);
    CHECK(bytes <= 1.03, "%.4f of X_min", bytes);
}

/* Rounds: what stays is spread evenly, the rest streams through a ring of four of the largest
 * units, fewer where the seconds of a round say so, also in a segment that was added. */
CASE(test_samples_stream_through_a_ring) {
    static struct model m;
    flux(&m, 3072, 1);
    for (int percent = 30; percent <= 70; percent += 20)
        for (int known = 0; known < 2; known++) {
            const size_t capacity = aligned(m.total / 100 * (size_t)percent);
            struct oo_plan *plan = plan_of(&m, capacity - 4 * m.largest);
            add_segment(plan, (uintptr_t)1 << 40, 4 * m.largest);
            for (unsigned unit = 0; known && unit < m.n; unit++)
                oo_plan_took(plan, unit, (double)m.bytes[unit] / 1e9);
            if (known)
                oo_plan_copied(plan, 0, 3000, 1e-6);
            repeat(plan, &m, m.step, m.n, 12);
            size_t streak = 0, longest = 0, bytes = 0;
            for (unsigned i = 0; i < m.n; i++) {
                const struct outcome o = run(plan, &m, m.step + i, 1);
                bytes += o.bytes;
                streak = o.bytes ? 0 : streak + m.bytes[i];
                longest = streak > longest ? streak : longest;
                CHECK(o.late == 0, "a late copy");
            }
            const size_t ring = (known ? 3 : 5) * m.largest; /* one is lost between the segments */
            printf("%d%% resident, seconds known: %d: %.4f of the bound, at most %.1f units "
                   "without a copy\n",
                   percent, known, (double)bytes / (double)(m.total - capacity),
                   (double)longest / (double)m.largest);
            CHECK(bytes <= m.total - capacity + ring + 2 * m.largest, "%zu bytes", bytes);
            CHECK(longest <= (known ? 6 : 12) * m.largest, "%zu bytes without a copy", longest);
            oo_plan_destroy(plan);
        }
}

/* Resident bytes among the units that a forward uses first and among those it uses last. */
static void halves(struct oo_plan *plan, const struct model *m, size_t half[2]) {
    half[0] = half[1] = 0;
    for (unsigned i = 0; i < m->n; i++)
        half[i >= m->n / 2] += oo_plan_resident(plan, i) ? m->bytes[i] : 0;
}

/* Of many samples between training steps each costs no more than without training. Those that stay
 * are spread once there were many, and at once where there were many the last time; but not where
 * that is known to save no time. They stay where they are while training goes on, and its places
 * are behind them: no step after the samples moves more than a ring beyond the least (1.4 times the
 * least where all of them went back). */
static void many_samples(double seconds_per_byte) {
    static struct model m;
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2), missing = m.total - capacity;
    struct oo_plan *plan = plan_of(&m, capacity);
    const int pays = seconds_per_byte < 1e-9;
    if (seconds_per_byte > 0)
        know(plan, &m, seconds_per_byte);
    for (int preview = 0; preview < 3; preview++) {
        for (int step = 0; step < 6; step++) {
            const struct outcome o = run(plan, &m, m.step, m.n_visits);
            printf("preview %d, step %d: %.3f X_min\n", preview, step,
                   (double)o.bytes / (double)x_min(&m, capacity));
            const size_t most = step == 0 ? (preview ? 104 : 155) : step == 1 && pays ? 103 : 101;
            CHECK(o.bytes * 100 <= x_min(&m, capacity) * most, "step %d: %zu bytes", step, o.bytes);
        }
        for (int sweep = 0; sweep < 30; sweep++) {
            const struct outcome o = run(plan, &m, m.step, m.n);
            size_t half[2];
            halves(plan, &m, half);
            printf("preview %d, sweep %d: %.3f of the missing bytes, %.2f and %.2f stay\n", preview,
                   sweep, (double)o.bytes / (double)missing, (double)half[0] / (double)capacity,
                   (double)half[1] / (double)capacity);
            const int spread = half[0] * 5 > half[1] * 4 && half[1] * 5 > half[0] * 4;
            CHECK(spread == (pays && (preview || sweep >= 9)),
                  "preview %d, sweep %d: %zu and %zu bytes stay", preview, sweep, half[0], half[1]);
            /* There; and later to where the ring of training was. */
            const int begin = preview ? 1 : 9;
            const int moves = pays && sweep + 1 >= begin && sweep <= begin + 1;
            const size_t moved = !moves ? 0 : preview ? capacity / 6 : missing;
            CHECK(o.bytes <= missing + moved + 6 * m.largest, "preview %d, sweep %d: %zu bytes",
                  preview, sweep, o.bytes);
        }
    }
    oo_plan_destroy(plan);
}

CASE(test_many_samples_are_no_interruption) {
    many_samples(0);
    many_samples(0.5e-9);
    many_samples(4e-9);
}

/* Samples, of which every kernel takes `told` times as long as its copy as far as is known before
 * sample `known`, then what it takes, but for what disturbs a measurement. Returns seconds of the
 * last, and of the slowest from the fifth on. */
static double samples_told(const struct model *m, size_t capacity, const double *kernels_s,
                           double told, int known, double *slowest) {
    static struct clocks c;
    struct oo_plan *plan = plan_of(m, capacity);
    double seconds = 0;
    c = (struct clocks){0};
    *slowest = 0;
    srand(1);
    oo_plan_copied(plan, 0, 3000, 3000.0 / LINK_BPS);
    for (int sample = 0; sample < 34; sample++) {
        for (unsigned unit = 0; unit < m->n; unit++)
            oo_plan_took(plan, unit,
                         sample < known ? told * (double)m->bytes[unit] / LINK_BPS
                                        : kernels_s[unit] * (1 + 0.02 * (rand() % 8)));
        seconds = timed_round_of(plan, m, &c, m->n, kernels_s).seconds;
        printf("sample %d: %.4f s\n", sample, seconds);
        *slowest = sample >= 4 && seconds > *slowest ? seconds : *slowest;
    }
    oo_plan_destroy(plan);
    return seconds;
}

/* The plan asks again which units stay after 9, 18, 36 ... samples. Seconds that differ a little
 * move no unit; where they were far off, those that stay are chosen again. */
CASE(test_samples_move_again_only_where_that_pays) {
    static struct model m;
    static double kernels_s[MAX_UNITS];
    double slowest;
    flux(&m, 3072, 1);
    for (unsigned unit = 0; unit < m.n; unit++)
        kernels_s[unit] = (unit % 16 < 4 ? 3.0 : 0.05) * (double)m.bytes[unit] / LINK_BPS;
    const size_t capacity = aligned(m.total / 4);
    const double best = samples_told(&m, capacity, kernels_s, 0, 0, &slowest);
    CHECK(slowest <= 1.01 * best, "%.4f s, after as many samples %.4f", slowest, best);
    const double mended = samples_told(&m, capacity, kernels_s, 9, 12, &slowest);
    CHECK(slowest >= 1.3 * best, "%.4f s where the seconds are far off, %.4f else", slowest, best);
    CHECK(mended <= 1.01 * best, "%.4f s where they were far off, %.4f else", mended, best);
}

/* Seconds of the last of so many samples, where those of the first units are known from the second
 * sample on, and those of the others `late`. The order may be known from an earlier run (-2), and
 * all seconds, too (-1). */
static double samples_told_late(const struct model *m, size_t capacity, int samples, unsigned first,
                                int late, const double *kernels_s) {
    static struct clocks c;
    struct oo_plan *plan = plan_of(m, capacity);
    double seconds = 0;
    c = (struct clocks){0};
    if (late < 0) {
        struct oo_visit visits[MAX_UNITS];
        for (unsigned unit = 0; unit < m->n; unit++)
            visits[unit] = (struct oo_visit){unit, OO_FORWARD};
        oo_plan_expect(plan, visits, m->n);
        for (unsigned unit = 0; late == -1 && unit < m->n; unit++)
            oo_plan_expect_seconds(plan, unit, kernels_s[unit]);
    }
    oo_plan_copied(plan, 0, 3000, 3000.0 / LINK_BPS);
    for (int sample = 0; sample < samples; sample++) {
        for (unsigned unit = 0; unit < m->n; unit++)
            if (sample == (unit < first ? 1 : late))
                oo_plan_took(plan, unit, kernels_s[unit]);
        seconds = timed_round_of(plan, m, &c, m->n, kernels_s).seconds;
        printf("%u units first, others %d: sample %d takes %.4f s\n", first, late, sample, seconds);
    }
    oo_plan_destroy(plan);
    return seconds;
}

/* Those that stay are chosen by the seconds once all of them are known, or after six samples; at
 * once where an earlier run has measured them. */
CASE(test_samples_wait_for_the_seconds_of_all) {
    static struct model m;
    static double kernels_s[MAX_UNITS];
    flux(&m, 3072, 1);
    for (unsigned unit = 0; unit < m.n; unit++)
        kernels_s[unit] = (unit < m.n / 2 ? 0.2 : 2.0) * (double)m.bytes[unit] / LINK_BPS;
    const size_t capacity = aligned(m.total / 4);
    const double best = samples_told_late(&m, capacity, 9, m.n, 9, kernels_s);
    const double late = samples_told_late(&m, capacity, 9, m.n / 2, 3, kernels_s);
    CHECK(late <= 1.01 * best, "%.4f s, %.4f where all were known at once", late, best);
    const double never = samples_told_late(&m, capacity, 9, m.n - 1, 9, kernels_s);
    CHECK(never <= 1.01 * best, "%.4f s, %.4f where all were known at once", never, best);
    const double before = samples_told_late(&m, capacity, 3, 0, -1, kernels_s);
    CHECK(before <= 1.01 * best, "%.4f s, %.4f in other runs", before, best);
    const double order = samples_told_late(&m, capacity, 9, m.n, -2, kernels_s);
    CHECK(order <= 1.01 * best, "%.4f s, %.4f in other runs", order, best);
}

/* Before any seconds are known, those that stay are spread all the same, from the second sample on:
 * what streams comes one by one, and the link has as much to do at any time. */
CASE(test_samples_are_spread_before_their_seconds_are_known) {
    static struct model m;
    static double kernels_s[MAX_UNITS];
    flux(&m, 3072, 1);
    for (unsigned unit = 0; unit < m.n; unit++)
        kernels_s[unit] = 0.75 * (double)m.bytes[unit] / LINK_BPS;
    const size_t capacity = aligned(m.total / 4);
    const double best = samples_told_late(&m, capacity, 9, m.n, 9, kernels_s);
    const double third = samples_told_late(&m, capacity, 3, 0, 9, kernels_s);
    CHECK(third <= 1.05 * best, "%.4f s, %.4f once they are known", third, best);
}

/* The ring begins with one that is small while no seconds are known, and is too small for that once
 * they are. */
CASE(test_a_ring_begins_elsewhere_once_the_seconds_are_known) {
    static struct model m;
    static double kernels_s[MAX_UNITS];
    static const size_t sizes[] = {8, 1, 1, 8, 28, 28, 28};
    const size_t capacity = 836 * (size_t)OO_ALIGNMENT;
    m = (struct model){.n = 560, .largest = sizes[4] * OO_ALIGNMENT};
    for (unsigned unit = 0; unit < m.n; unit++) {
        m.bytes[unit] = sizes[unit % 7] * OO_ALIGNMENT;
        m.total += m.bytes[unit];
        m.step[unit] = (struct visit){unit, OO_FORWARD};
        kernels_s[unit] = 1.637 * (double)m.bytes[unit] / LINK_BPS;
    }
    const double best = samples_told_late(&m, capacity, 9, m.n, 9, kernels_s);
    const double late = samples_told_late(&m, capacity, 9, 0, 3, kernels_s);
    CHECK(late <= 1.01 * best, "%.4f s, %.4f where all were known at once", late, best);
}

/* Seconds that become known after training has begun move no unit: the step after those samples
 * would have to fetch it all back. */
CASE(test_seconds_that_training_makes_known_move_nobody) {
    static struct model m;
    static struct clocks c;
    flux(&m, 3072, 1);
    for (int percent = 25; percent <= 50; percent += 25) {
        const size_t capacity = aligned(m.total / 100 * (size_t)percent);
        struct oo_plan *plan = plan_of(&m, capacity);
        c = (struct clocks){0};
        oo_plan_copied(plan, 0, 3000, 3000.0 / LINK_BPS);
        timed_rounds(plan, &m, &c, m.n, 4);
        for (unsigned unit = 0; unit + 1 < m.n; unit++)
            oo_plan_took(plan, unit, 0.2 * (double)m.bytes[unit] / LINK_BPS);
        timed_rounds(plan, &m, &c, m.n_visits, 5);
        timed_rounds(plan, &m, &c, m.n, 6);
        const double bytes = (double)timed_round(plan, &m, &c, m.n_visits).bytes;
        const double ratio = bytes / (double)x_min(&m, capacity);
        CHECK(ratio <= 1.05, "%d%% resident: the step after samples takes %.3f of the least",
              percent, ratio);
        oo_plan_destroy(plan);
    }
}

/* Those that stay keep their places where most of them can: what moves is copied again. */
CASE(test_who_stays_where_it_lies_is_not_copied_again) {
    static struct model m;
    flux_of(&m, 5, 512, 1);
    const size_t capacity = aligned(m.total / 2), missing = m.total - capacity;
    struct oo_plan *plan = plan_of(&m, capacity);
    for (size_t sample = 0; sample < 6; sample++) {
        const struct outcome o = run(plan, &m, m.step, m.n);
        const double loaded = (double)o.bytes / (double)missing;
        printf("sample %zu: %.3f of what is missing\n", sample, loaded);
        CHECK(sample == 0 || loaded <= (sample == 1 ? 1.7 : 1.05), "sample %zu: %.3f", sample,
              loaded);
    }
    oo_plan_destroy(plan);
}

/* A ring for seconds that were not known is as small as they ask for once they are known, and no
 * unit moves for that: samples load no more than they did, but for what one has loaded ahead of the
 * next.
 */
CASE(test_a_ring_shrinks_once_the_seconds_are_known) {
    static struct model m;
    flux(&m, 3072, 1);
    for (int segments = 1; segments <= 2; segments++) {
        const size_t capacity = aligned(m.total / 4), added = segments == 2 ? capacity / 2 : 0;
        struct oo_plan *plan = plan_of(&m, capacity - added);
        if (added)
            add_segment(plan, (uintptr_t)1 << 40, added);
        size_t before = 0, after = 0, loaded = 0;
        for (size_t sample = 0; sample < 16; sample++) {
            const struct outcome o = run(plan, &m, m.step, m.n);
            printf("sample %zu: %.2f of the largest unit over what is missing\n", sample,
                   ((double)o.bytes - (double)(m.total - capacity)) / (double)m.largest);
            after = o.bytes;
            before = sample == 4 ? after : before;
            loaded += sample > 4 ? after : 0;
            CHECK(sample < 4 || loaded <= (sample - 4) * before + 2 * m.largest,
                  "until sample %zu: %zu bytes, %zu each before", sample, loaded, before);
            if (sample == 4)
                know(plan, &m, 9.0 / LINK_BPS);
        }
        CHECK(after + m.largest <= before, "%zu bytes, %zu before", after, before);
        oo_plan_destroy(plan);
    }
}

/* Others stay once the seconds are known, if a round copies less then, and the link can move them
 * while kernels take all the time. Where the link is what a round waits for, that has to pay. */
CASE(test_others_stay_for_fewer_bytes_only_while_kernels_take_all_the_time) {
    static struct model m;
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2);
    const double missing = (double)(m.total - capacity);
    for (int by_kernels = 0; by_kernels < 2; by_kernels++) {
        struct oo_plan *plan = plan_of(&m, capacity);
        double loaded = 0;
        for (size_t sample = 0; sample < 12; sample++) {
            const struct outcome o = run(plan, &m, m.step, m.n);
            loaded = (double)o.bytes / missing;
            CHECK(sample < 6 || by_kernels || loaded <= 1.05, "sample %zu: %.3f", sample, loaded);
            for (unsigned unit = 0; sample == 4 && unit < m.n; unit++)
                oo_plan_took(plan, unit,
                             (by_kernels ? 2.0 : 0.2) * (unit % 3 ? 1.3 : 0.4) *
                                 (double)m.bytes[unit] / LINK_BPS);
            if (sample == 4)
                oo_plan_copied(plan, 0, 3000, 3000.0 / LINK_BPS);
        }
        printf("%s: %.3f of what is missing\n", by_kernels ? "kernels" : "the link", loaded);
        CHECK(!by_kernels || loaded <= 1.018, "%.3f of what is missing", loaded);
        oo_plan_destroy(plan);
    }
}

/* Few samples between training steps leave what is in the arena there: the first step after them
 * has nearly all its bytes back, and so has every later one. The latest training step was followed
 * by samples then, and those before it by training. */
CASE(test_training_goes_on_after_samples) {
    static struct model m;
    for (int percent = 30; percent <= 70; percent += 20) {
        flux(&m, 3072, 1);
        const size_t capacity = aligned(m.total / 100 * (size_t)percent);
        struct oo_plan *plan = plan_of(&m, capacity);
        for (int preview = 0; preview < 3; preview++) {
            for (int step = 0; step < 4; step++) {
                const struct outcome o = run(plan, &m, m.step, m.n_visits);
                printf("%d%%, %d. preview, step %d: %.3f X_min\n", percent, preview, step,
                       (double)o.bytes / (double)x_min(&m, capacity));
                CHECK((step == 0 && (preview == 0 || o.late <= 1)) || o.late == 0, "%u late",
                      o.late);
                CHECK(preview + step == 0 || o.bytes * 100 <= x_min(&m, capacity) * 105,
                      "%d%%, preview %d, step %d: %zu bytes, bound %zu", percent, preview, step,
                      o.bytes, x_min(&m, capacity));
            }
            struct outcome last = {0, 0};
            for (int sweep = 0; sweep < 4 + 2 * preview; sweep++)
                last = run(plan, &m, m.step, m.n);
            CHECK(last.bytes <= m.total - capacity + 4 * m.largest && last.late == 0,
                  "%d%%, preview %d: a sweep loads %zu bytes, %u late", percent, preview,
                  last.bytes, last.late);
        }
        oo_plan_destroy(plan);
    }
}

/* Training as `m`, whose forwards are recorded from unit `first` on, `every` so many. */
static struct model recorded(const struct model *m, unsigned first, unsigned every) {
    struct model training = *m;
    for (unsigned i = first; i < m->n; i += every)
        training.step[i].kind = OO_RECORDED;
    return training;
}

/* Where training's forward can be distinguished from a sample, the first step after samples knows
 * that a backward follows, however many they were: what a sample would want next is not fetched at
 * its turn. So it moves fewer bytes, and all later ones are as without samples, or nearly. */
CASE(test_recorded_forwards_tell_training_from_samples) {
    static struct model m, training;
    static const unsigned samples[] = {4, 4, 5, 30, 12, 30}, ways[][2] = {{0, 1}, {5, 1}, {3, 7}};
    flux(&m, 3072, 1);
    for (size_t way = 0; way < CHECK_COUNT(ways); way++)
        for (int percent = 30; percent <= 75; percent += 15) {
            training = recorded(&m, ways[way][0], ways[way][1]);
            const size_t capacity = aligned(m.total / 100 * (size_t)percent);
            const double least = (double)x_min(&m, capacity);
            struct oo_plan *plan = plan_of(&m, capacity);
            for (size_t preview = 0; preview < CHECK_COUNT(samples); preview++) {
                for (int step = 0; step < 4; step++) {
                    const struct outcome o = run(plan, &training, training.step, m.n_visits);
                    const double most = step < 2 ? 1.04 : 1.015;
                    printf("%d%%, preview %zu, step %d: %.3f X_min, %u late\n", percent, preview,
                           step, (double)o.bytes / least, o.late);
                    CHECK(preview + (size_t)step == 0 || (double)o.bytes <= most * least,
                          "%d%%, preview %zu, step %d: %.3f", percent, preview, step,
                          (double)o.bytes / least);
                }
                struct outcome last = {0, 0};
                last = repeat(plan, &m, m.step, m.n, samples[preview]);
                CHECK(last.bytes <= m.total - capacity + 5 * m.largest && last.late == 0,
                      "%d%%, preview %zu: a sweep loads %zu bytes, %u late", percent, preview,
                      last.bytes, last.late);
            }
            oo_plan_destroy(plan);
        }
}

/* The visits of `m`, of units that were created against the order of use. */
static struct model reversed(const struct model *m) {
    struct model other = *m;
    for (unsigned u = 0; u < m->n; u++)
        other.bytes[m->n - 1 - u] = m->bytes[u];
    for (unsigned i = 0; i < m->n_visits; i++)
        other.step[i].unit = m->n - 1 - m->step[i].unit;
    return other;
}

/* The visits of `m`, of units that were created in any order. */
static struct model shuffled(const struct model *m, unsigned seed) {
    struct model other = *m;
    static unsigned order[MAX_UNITS];
    srand(seed);
    for (unsigned u = 0; u < m->n; u++)
        order[u] = u;
    for (unsigned u = m->n; u-- > 1;) {
        const unsigned k = (unsigned)rand() % (u + 1), swapped = order[u];
        order[u] = order[k];
        order[k] = swapped;
    }
    for (unsigned u = 0; u < m->n; u++)
        other.bytes[order[u]] = m->bytes[u];
    for (unsigned i = 0; i < m->n_visits; i++)
        other.step[i].unit = order[m->step[i].unit];
    return other;
}

/* The first forward of a kind is expected to go as those of the other kind did, in whatever order
 * the units were created. */
CASE(test_the_first_of_a_kind_knows_the_order) {
    static struct model m, other[2];
    flux(&m, 3072, 1);
    m = shuffled(&m, 7);
    other[0] = m;
    other[1] = recorded(&m, 0, 1);
    for (int first = 0; first < 2; first++)
        for (int percent = 30; percent <= 70; percent += 20) {
            struct oo_plan *plan = plan_of(&m, aligned(m.total / 100 * (size_t)percent));
            for (int n = 0; n < 6; n++)
                run(plan, &m, other[first].step, m.n);
            const struct outcome o = run(plan, &m, other[!first].step, m.n);
            CHECK(o.late <= 3, "%d%%, first %d: %u late", percent, first, o.late);
            CHECK(o.bytes <= m.total, "%d%%, first %d: %zu bytes", percent, first, o.bytes);
            oo_plan_destroy(plan);
        }
}

/* Where samples are recorded as training's forward is (the engine does not know that they are
 * samples), the result is that of a run in which neither is recorded. */
CASE(test_samples_that_are_recorded_are_no_training) {
    static struct model kinds[2];
    flux(&kinds[0], 3072, 1);
    kinds[1] = recorded(&kinds[0], 0, 1);
    for (int percent = 20; percent <= 80; percent += 20) {
        const size_t capacity = aligned(kinds[0].total / 100 * (size_t)percent);
        struct oo_plan *plans[] = {plan_of(&kinds[0], capacity), plan_of(&kinds[1], capacity)};
        for (int round = 0; round < 40; round++) {
            struct outcome o[2];
            for (int i = 0; i < 2; i++)
                o[i] = run(plans[i], &kinds[i], kinds[i].step,
                           round % 20 < 4 ? kinds[i].n_visits : kinds[i].n);
            CHECK(o[0].bytes == o[1].bytes && o[0].late == o[1].late, "%d%%, %d: %zu, %zu", percent,
                  round, o[0].bytes, o[1].bytes);
        }
        oo_plan_destroy(plans[0]);
        oo_plan_destroy(plans[1]);
    }
}

/* A forward that is recorded and breaks off is no training: what it has settled for those that were
 * spread then does not bind later samples, and training after them finds back. */
CASE(test_forwards_that_break_off_bind_nobody) {
    static struct model m, training;
    static const struct {
        unsigned samples, broken, after;
    } cases[] = {{5, 2, 12}, {61, 30, 0}, {30, 1, 30}, {12, 3, 2}};
    flux_of_blocks(&m, 8, 12, 1024, 1);
    training = recorded(&m, 0, 1);
    for (size_t i = 0; i < CHECK_COUNT(cases); i++)
        for (int percent = 40; percent <= 85; percent += 5) {
            const size_t capacity = aligned(m.total / 100 * (size_t)percent);
            struct oo_plan *plan = plan_of(&m, capacity);
            struct outcome last = {0, 0};
            repeat(plan, &m, training.step, m.n_visits, 4);
            repeat(plan, &m, m.step, m.n, cases[i].samples);
            repeat(plan, &m, training.step, m.n / 2, cases[i].broken);
            repeat(plan, &m, m.step, m.n, cases[i].after);
            last = repeat(plan, &m, training.step, m.n_visits, 8);
            printf("%d%%, case %zu: %.3f X_min\n", percent, i,
                   (double)last.bytes / (double)x_min(&m, capacity));
            CHECK((double)last.bytes <= 1.06 * (double)x_min(&m, capacity),
                  "%d%%, case %zu: %.3f X_min", percent, i,
                  (double)last.bytes / (double)x_min(&m, capacity));
            oo_plan_destroy(plan);
        }
}

/* Once training has found back from samples, its steps move what they did before them: also where
 * units are created against their order, and whatever else is sampled in between. */
CASE(test_steps_are_what_they_were_before_samples) {
    static struct model m, other;
    static const int resident[] = {15, 25, 40, 60, 85};
    flux(&m, 3072, 1);
    for (int against = 0; against < 2; against++)
        for (int percent = 0; percent < 5; percent++)
            for (unsigned others = 0; others < 3; others++) {
                const size_t capacity = aligned(m.total / 100 * (size_t)resident[percent]);
                other = against ? reversed(&m) : m;
                struct oo_plan *plan = plan_of(&other, capacity);
                struct outcome before = {0, 0}, after = {0, 0};
                /* The last third of the units is sampled alone. */
                const struct visit *encoder = other.step + m.n - m.n / 3;
                before = repeat(plan, &other, other.step, m.n_visits, 5);
                repeat(plan, &other, other.step, m.n, 30);
                for (int sample = 0; others && sample < (others == 1 ? 4 : 30); sample++)
                    run(plan, &other, encoder, m.n / 3);
                for (int step = 0; step < 6; step++) {
                    after = run(plan, &other, other.step, m.n_visits);
                    printf("%d%%, against %d, others %u, step %d: %.3f\n", resident[percent],
                           against, others, step, (double)after.bytes / (double)before.bytes);
                }
                CHECK((double)after.bytes <= 1.005 * (double)before.bytes, "%d%%, %d, %u: %zu, %zu",
                      resident[percent], against, others, after.bytes, before.bytes);
                oo_plan_destroy(plan);
            }
}

/* Nor does what they displaced stay so: from the third step after them on, the link rests as little
 * as without them. */
CASE(test_training_takes_as_long_after_samples) {
    static struct model m;
    static struct clocks c;
    flux(&m, 3072, 1);
    for (int percent = 25; percent <= 75; percent += 10) {
        struct oo_plan *plan = plan_of(&m, aligned(m.total / 100 * (size_t)percent));
        struct step before = {0, 0}, after = {0, 0};
        c = (struct clocks){0};
        for (int preview = 0; preview < 3; preview++) {
            after = timed_rounds(plan, &m, &c, m.n_visits, 4);
            before = preview ? before : after;
            printf("%d%% resident, preview %d: %.3f s, %zu bytes\n", percent, preview,
                   after.seconds, after.bytes);
            CHECK(after.seconds <= 1.002 * before.seconds, "%d%%: %.4f s, %.4f s before", percent,
                  after.seconds, before.seconds);
            timed_rounds(plan, &m, &c, m.n, 4);
        }
        oo_plan_destroy(plan);
    }
}

/* A unit of several members is visited once for each, in a row: that is no round, and samples
 * between training steps cost what they cost with units of one. */
CASE(test_rounds_of_units_with_several_members) {
    static struct model m;
    static struct visit visits[MAX_VISITS];
    unsigned n = 0, n_forward = 0;
    flux(&m, 3072, 1);
    for (unsigned i = 0; i < m.n_visits; i++) {
        for (unsigned member = 0; member <= m.step[i].unit % 3; member++)
            visits[n++] = m.step[i];
        n_forward = i < m.n ? n : n_forward;
    }
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity), *alone = plan_of(&m, capacity);
    for (int round = 0; round < 16; round++) {
        const int samples = round % 8 >= 4;
        const struct outcome of_members = run(plan, &m, visits, samples ? n_forward : n),
                             of_units = run(alone, &m, m.step, samples ? m.n : m.n_visits);
        printf("%s: %zu bytes of units of several members, %zu else\n", samples ? "sweep" : "step",
               of_members.bytes, of_units.bytes);
        CHECK(round < 2 || of_members.bytes <= of_units.bytes + 2 * m.largest,
              "round %d: %zu bytes for %zu", round, of_members.bytes, of_units.bytes);
    }
    oo_plan_destroy(plan);
    oo_plan_destroy(alone);
}

/* `n` units of one size, in order. */
static void uniform(struct model *m, unsigned n) {
    *m = (struct model){.n = n, .largest = OO_ALIGNMENT, .total = n * (size_t)OO_ALIGNMENT};
    for (unsigned u = 0; u < n; u++) {
        m->bytes[u] = OO_ALIGNMENT;
        m->step[m->n_visits++] = (struct visit){u, OO_FORWARD};
    }
    for (unsigned u = n; u-- > 0;)
        m->step[m->n_visits++] = (struct visit){u, OO_BACKWARD};
}

/* A past is compared as far as 256 visits back, which is less than a forward of many units: what
 * follows samples is known all the same, but for one late copy and what was fetched ahead of it. */
CASE(test_long_forwards_after_samples) {
    static struct model m;
    for (unsigned n = 120; n <= 1200; n *= 10) {
        uniform(&m, n);
        const size_t capacity = n / 2 * (size_t)OO_ALIGNMENT, missing = m.total - capacity;
        struct oo_plan *plan = plan_of(&m, capacity);
        for (int preview = 0; preview < 6; preview++) {
            for (int step = 0; step < 3; step++) {
                const struct outcome o = run(plan, &m, m.step, m.n_visits);
                printf("%u units, preview %d, step %d: %.3f of the least, %u late\n", n, preview,
                       step, (double)o.bytes / (double)x_min(&m, capacity), o.late);
                const size_t ring = step == 0 ? 3 * m.largest : 0;
                CHECK(preview + step == 0 ||
                          (o.bytes <= x_min(&m, capacity) + ring && o.late <= (step == 0)),
                      "preview %d, step %d", preview, step);
            }
            for (int sample = 0; sample < 1 + 2 * (preview % 3); sample++) {
                const struct outcome o = run(plan, &m, m.step, m.n);
                printf("%u units, preview %d, sample %d: %.3f of the missing, %u late\n", n,
                       preview, sample, (double)o.bytes / (double)missing, o.late);
                CHECK(o.bytes <= missing + capacity / 16 + 3 * m.largest && o.late <= 1,
                      "preview %d, sample %d", preview, sample);
            }
        }
        oo_plan_destroy(plan);
    }
}

/* Pictures: a text encoder once, a denoiser twenty times, a decoder once. All that is between two
 * uses of the encoder is no round of its own; the denoiser's are. */
CASE(test_rounds_within_a_round) {
    static struct model m;
    static struct visit training[MAX_VISITS];
    enum { TEXT = 20, DENOISER = 40, DECODER = 5, TIMES = 20 };
    uniform(&m, TEXT + DENOISER + DECODER);
    for (uint32_t i = 0; i < DENOISER; i++) {
        training[i] = (struct visit){TEXT + i, OO_FORWARD};
        training[2 * DENOISER - 1 - i] = (struct visit){TEXT + i, OO_BACKWARD};
    }
    const size_t capacity = 30 * (size_t)OO_ALIGNMENT;
    struct oo_plan *plan = plan_of(&m, capacity);
    for (int known = 0; known < 2; known++)
        for (int preview = 0; preview < 3; preview++) {
            if (known)
                know(plan, &m, 0.9e-9);
            for (int step = 0; step < 4; step++)
                run(plan, &m, training, 2 * DENOISER);
            for (int picture = 0; picture < 4; picture++) {
                run(plan, &m, m.step, TEXT);
                size_t bytes = 0;
                for (int i = 0; i < TIMES; i++)
                    bytes += run(plan, &m, m.step + TEXT, DENOISER).bytes;
                run(plan, &m, m.step + TEXT + DENOISER, DECODER);
                printf("seconds known %d, preview %d, picture %d: %zu units\n", known, preview,
                       picture, bytes / OO_ALIGNMENT);
                /* Ten do not fit; to find out costs as many again, and a few of the others. */
                CHECK(bytes <= (TIMES * 14 + 30) * (size_t)OO_ALIGNMENT, "%zu units",
                      bytes / OO_ALIGNMENT);
            }
        }
    oo_plan_destroy(plan);
}

/* Where a unit is used twice in a forward, as tied weights are, samples are counted by whole
 * forwards: a few of them leave the arena to training. */
CASE(test_a_unit_that_is_used_twice_in_a_round) {
    static struct model m;
    static struct visit step[MAX_VISITS];
    unsigned n = 0, n_forward;
    uniform(&m, 61);
    for (unsigned i = 0; i < m.n; i++)
        step[n++] = (struct visit){i, OO_FORWARD};
    step[n++] = (struct visit){2, OO_FORWARD};
    n_forward = n;
    for (unsigned i = n_forward; i-- > 0;)
        step[n++] = (struct visit){step[i].unit, OO_BACKWARD};
    const size_t capacity = 30 * (size_t)OO_ALIGNMENT;
    struct oo_plan *plan = plan_of(&m, capacity);
    for (int preview = 0; preview < 3; preview++) {
        for (int i = 0; i < 5; i++) {
            const struct outcome o = run(plan, &m, step, n);
            printf("preview %d, step %d: %zu units\n", preview, i, o.bytes / OO_ALIGNMENT);
            CHECK(preview + i <= 1 || o.bytes <= x_min(&m, capacity) + 5 * m.largest, "%zu units",
                  o.bytes / OO_ALIGNMENT);
        }
        repeat(plan, &m, step, n_forward, 6);
    }
    oo_plan_destroy(plan);
}

/* Training that begins after samples leaves those that are spread where they are, too: it learns
 * what a block is from its first backward, and from then on takes hardly more than the least (up to
 * 1.46 of it in the fourth step, and more in each later step, while they were in the places of
 * others). */
CASE(test_training_begins_after_samples) {
    static struct model m;
    static struct clocks c;
    for (int checkpointed = 0; checkpointed < 2; checkpointed++)
        for (int percent = 25; percent <= 75; percent += 10) {
            flux(&m, 3072, checkpointed);
            const size_t capacity = aligned(m.total / 100 * (size_t)percent);
            const double least = (double)x_min(&m, capacity), copies_s = least / 2 / LINK_BPS;
            const double kernels_s = 0.2 * (double)m.total / LINK_BPS;
            const double back_s = (1 + checkpointed) * kernels_s;
            const double bound_s = (kernels_s > copies_s ? kernels_s : copies_s) +
                                   (back_s > copies_s ? back_s : copies_s);
            struct oo_plan *plan = plan_of(&m, capacity);
            c = (struct clocks){0};
            know(plan, &m, 0.2 / LINK_BPS);
            timed_rounds(plan, &m, &c, m.n, 12);
            for (int step = 0; step < 4; step++) {
                const struct step o = timed_round(plan, &m, &c, m.n_visits);
                const double bytes = (double)o.bytes / least;
                const double seconds = o.seconds / bound_s;
                printf("%d%% resident, checkpoints %d, step %d: %.3f of the least bytes, %.3f of "
                       "the bound\n",
                       percent, checkpointed, step, bytes, seconds);
                CHECK(bytes <= (step < 2 ? 1.26 : 1.015), "step %d: %.3f", step, bytes);
                CHECK(seconds <= (step < 2 ? 1.26 : 1.025), "step %d: %.3f", step, seconds);
            }
            oo_plan_destroy(plan);
        }
}

/* Where the arena's segments come or go, those that were spread in it have no place in
 * particular. */
CASE(test_a_segment_goes_after_samples_were_spread) {
    static struct model m;
    static struct clocks c;
    flux(&m, 3072, 1);
    const size_t first = aligned(m.total / 5), capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, first);
    struct oo_arena *arena = oo_plan_arena(plan);
    struct oo_segment *gone = arena->segments;
    add_segment(plan, (uintptr_t)1 << 40, capacity);
    timed_rounds(plan, &m, &c, m.n_visits, 3);
    timed_rounds(plan, &m, &c, m.n, 12);
    timed_rounds(plan, &m, &c, m.n_visits, 3);
    for (unsigned unit = 0; unit < m.n; unit++)
        if (oo_plan_resident(plan, unit) && oo_plan_resident(plan, unit)->segment == gone)
            oo_plan_drop(plan, unit);
    oo_arena_remove(arena, gone);
    for (int step = 0; step < 5; step++) {
        const struct step o = timed_round(plan, &m, &c, m.n_visits);
        const double copies_s = (double)x_min(&m, capacity) / LINK_BPS;
        printf("step %d: %.3f X_min, %.3f of its seconds\n", step,
               (double)o.bytes / (double)x_min(&m, capacity), o.seconds / copies_s);
        CHECK(step < 2 ||
                  (o.bytes <= x_min(&m, capacity) / 1000 * 1010 && o.seconds <= 1.03 * copies_s),
              "step %d", step);
    }
    oo_plan_destroy(plan);
}

/* Each unit that has to leave is returned once, so that one that cannot leave does not block the
 * others. */
CASE(test_each_that_leaves_is_told_once) {
    static struct model m;
    uint32_t unit, last = 0;
    unsigned count = 0;
    flux(&m, 3072, 1);
    struct oo_plan *plan = plan_of(&m, aligned(m.total / 2));
    repeat(plan, &m, m.step, m.n_visits, 3);
    repeat(plan, &m, m.step, m.n, 12);
    CHECK(!oo_plan_next_drop(plan, &unit), "unit %u has to leave before training", unit);
    run(plan, &m, m.step, m.n_visits);
    oo_plan_visit(plan, 0, OO_FORWARD);
    oo_plan_pin(plan, 0);
    for (; oo_plan_next_drop(plan, &unit) && count < m.n; count++, last = unit)
        CHECK(unit > last && oo_plan_resident(plan, unit) && !oo_plan_pins(plan, unit),
              "unit %u after %u", unit, last);
    CHECK(count > 4 && count < m.n / 8, "%u units have to leave", count);
    oo_plan_unpin(plan, 0);
    oo_plan_destroy(plan);
}

/* Two kinds of step take turns, of which one leaves units out: each is known once both were met. */
CASE(test_steps_that_take_turns_keep_their_own_order) {
    static struct model m;
    static struct visit other[MAX_VISITS];
    unsigned n = 0;
    flux(&m, 3072, 1);
    for (unsigned i = 0; i < m.n_visits; i++)
        if (m.step[i].unit % 3 != 1)
            other[n++] = m.step[i];
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity);
    for (int round = 0; round < 8; round++) {
        const struct outcome whole = run(plan, &m, m.step, m.n_visits),
                             less = run(plan, &m, other, n);
        printf("round %d: %u and %u late\n", round, whole.late, less.late);
        if (round >= 3)
            CHECK(whole.late == 0 && less.late == 0, "round %d: %u and %u late", round, whole.late,
                  less.late);
    }
    oo_plan_destroy(plan);
}

/* Of so many units, those needed last are looked at, and not all. */
CASE(test_thousands_of_units_move_as_few_bytes) {
    static struct model m;
    flux_of(&m, 5, 512, 1);
    for (int percent = 10; percent <= 90; percent += 40) {
        const size_t capacity = aligned(m.total / 100 * (size_t)percent);
        for (int samples = 0; samples < 2; samples++) {
            struct oo_plan *plan = plan_of(&m, capacity);
            const size_t bound = samples ? m.total - capacity : x_min(&m, capacity);
            struct outcome o = {0, 0};
            for (int round = 0; round < 4; round++)
                o = run(plan, &m, m.step, samples ? m.n : m.n_visits);
            printf("%s, %d%% resident: %.4f of the bound\n", samples ? "sampling" : "training",
                   percent, (double)o.bytes / (double)bound);
            /* As much as if all were looked at: sampling is not at its bound then either. */
            CHECK(o.bytes * 1000 <= bound * (samples ? 1070 : 1002) && o.late == 0,
                  "%zu bytes, %u late", o.bytes, o.late);
            oo_plan_destroy(plan);
        }
    }
}

CASE(test_a_skipped_or_repeated_unit_costs_little) {
    static struct model m;
    static struct visit changed[MAX_VISITS];
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity);
    repeat(plan, &m, m.step, m.n_visits, 3);
    for (unsigned at = 7; at < m.n_visits; at += m.n_visits / 9) {
        unsigned n = 0;
        for (unsigned i = 0; i < m.n_visits; i++) {
            if (i == at)
                continue;
            changed[n++] = m.step[i];
            if (i == at + 3)
                changed[n++] = (struct visit){m.step[at].unit, m.step[i].kind};
        }
        const struct outcome odd = run(plan, &m, changed, n);
        CHECK(odd.late <= 6, "%u late copies after a change at visit %u", odd.late, at);
        CHECK(odd.bytes * 100 <= x_min(&m, capacity) * 125, "%zu bytes after a change at visit %u",
              odd.bytes, at);
        run(plan, &m, m.step, m.n_visits);
        const struct outcome healed = run(plan, &m, m.step, m.n_visits);
        CHECK(healed.late == 0, "%u late copies a step after the change at %u", healed.late, at);
    }
    oo_plan_destroy(plan);
}

CASE(test_a_pinned_unit_is_never_evicted) {
    static struct model m;
    flux(&m, 64, 0);
    struct oo_plan *plan = plan_of(&m, aligned(3 * m.largest));
    struct oo_window window;
    oo_plan_visit(plan, 5, OO_FORWARD);
    CHECK(oo_plan_place(plan, 5, &window), "an empty arena has place");
    const struct oo_block *block = oo_plan_take(plan, 5, &window);
    oo_plan_pin(plan, 5);
    run(plan, &m, m.step, m.n_visits);
    CHECK(oo_plan_resident(plan, 5) == block, "the pinned unit was evicted or moved");
    oo_plan_unpin(plan, 5);
    oo_plan_destroy(plan);
}

CASE(test_units_not_allowed_ahead_are_only_fetched_on_demand) {
    static struct model m;
    flux(&m, 64, 0);
    struct oo_plan *plan = plan_of(&m, m.total);
    run(plan, &m, m.step, m.n_visits);
    oo_plan_allow(plan, 9, 0);
    oo_plan_drop(plan, 9);
    CHECK(run(plan, &m, m.step, 9).bytes == 0 && !oo_plan_resident(plan, 9),
          "unit 9 was fetched ahead");
    CHECK(run(plan, &m, m.step + 9, 1).late == 1, "unit 9 was not fetched on demand");
    oo_plan_drop(plan, 9);
    oo_plan_allow(plan, 9, 1);
    run(plan, &m, m.step + 10, 1);
    CHECK(oo_plan_resident(plan, 9) != NULL, "unit 9 is not fetched ahead again");
    oo_plan_destroy(plan);
}

CASE(test_the_first_step_knows_no_order_and_still_behaves) {
    static struct model m;
    for (int checkpointed = 0; checkpointed < 2; checkpointed++) {
        flux(&m, 3072, checkpointed);
        const size_t capacity = aligned(m.total / 3);
        struct oo_plan *plan = plan_of(&m, capacity);
        const struct outcome first = run(plan, &m, m.step, m.n_visits);
        CHECK(first.bytes <= 2 * m.total, "the first step moves %zu bytes of a model of %zu",
              first.bytes, m.total);
        oo_plan_destroy(plan);
    }
}

/* What an earlier run has learned is predicted from the first visit on. */
CASE(test_an_order_that_is_told_serves_the_first_step) {
    static struct model m;
    for (int reversed = 0; reversed < 2; reversed++) {
        for (unsigned share = 2; share <= 8; share *= 2) {
            flux(&m, 3072, 1);
            for (unsigned i = 0; reversed && i < m.n_visits; i++) /* not the order of creation */
                m.step[i].unit = m.n - 1 - m.step[i].unit;
            const size_t capacity = aligned(m.total / share + m.block);
            struct oo_plan *plan = plan_of(&m, capacity);
            for (unsigned i = 0; i < 2 * m.n_visits; i++)
                oo_plan_visit(plan, m.step[i % m.n_visits].unit, m.step[i % m.n_visits].kind);
            CHECK(oo_plan_block_bytes(plan) == m.block, "the block is learned, too");
            CHECK(oo_plan_end_of_visits(plan) - oo_plan_first_visit(plan) == 2 * m.n_visits,
                  "all visits are remembered");
            const struct outcome first = run(plan, &m, m.step, m.n_visits);
            const size_t least = 2 * m.total - capacity;
            CHECK(first.late == 1 && first.bytes >= least && first.bytes * 100 <= least * 102,
                  "%u late, %zu bytes of at least %zu", first.late, first.bytes, least);
            const struct outcome second = run(plan, &m, m.step, m.n_visits);
            CHECK(second.late == 0 && second.bytes * 100 <= x_min(&m, capacity) * 102,
                  "then %u late, %zu bytes", second.late, second.bytes);
            oo_plan_destroy(plan);
        }
    }
}

/* A wrong order costs late copies in the step that it is wrong in, and in none after the next. */
CASE(test_a_wrong_order_is_forgotten) {
    static struct model m;
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity);
    for (unsigned i = 0; i < 2 * m.n_visits; i++)
        oo_plan_visit(plan, (i * 7919) % m.n, (enum oo_kind)(i % 3));
    struct outcome last = run(plan, &m, m.step, m.n_visits);
    last = repeat(plan, &m, m.step, m.n_visits, 2);
    CHECK(last.late == 0 && last.bytes * 100 <= x_min(&m, capacity) * 102, "%u late, %zu bytes",
          last.late, last.bytes);
    oo_plan_destroy(plan);
}

/* Blocks tile the segments, neighbours are merged, the index and the arena agree. */
static void check_arena(struct oo_plan *plan, unsigned n_units) {
    size_t used = 0;
    unsigned occupied = 0, resident = 0;
    for (const struct oo_segment *s = oo_plan_arena(plan)->segments; s; s = s->next) {
        size_t offset = 0;
        const struct oo_block *previous = NULL;
        for (const struct oo_block *b = s->first; b; previous = b, b = b->next) {
            CHECK(b->offset == offset && b->previous == previous && b->segment == s,
                  "broken chain at %zu", offset);
            CHECK(!(previous && previous->unit == OO_NO_UNIT && b->unit == OO_NO_UNIT),
                  "free neighbours at %zu", offset);
            if (b->unit != OO_NO_UNIT) {
                CHECK(oo_plan_resident(plan, b->unit) == b, "unit %u is not where the arena says",
                      b->unit);
                used += b->bytes;
                occupied++;
            }
            offset += b->bytes;
        }
        CHECK(offset == s->bytes, "%zu of %zu bytes accounted for", offset, s->bytes);
    }
    for (unsigned i = 0; i < n_units; i++)
        resident += oo_plan_resident(plan, i) != NULL;
    CHECK(used == oo_plan_arena(plan)->used_bytes && occupied == resident,
          "%zu used, %u blocks, %u units", used, occupied, resident);
}

static uint64_t use_of_three(const void *context, uint32_t unit) {
    return ((const uint64_t *)context)[unit];
}

/* Of windows with as many bytes to evict, the one that is needed last. */
CASE(test_what_is_needed_last_makes_place) {
    static const uint64_t uses[][3] = {{5, 9, 7}, {9, 5, 7}, {5, 7, 9}};
    for (int order = 0; order < 3; order++) {
        struct oo_arena arena = {0};
        struct oo_segment *segment;
        struct oo_window window;
        CHECK(oo_arena_add(&arena, 1 << 20, 3 * OO_ALIGNMENT, 0, 0, &segment) == OO_OK, "segment");
        for (uint32_t unit = 0; unit < 3; unit++) {
            CHECK(oo_arena_reserve(&arena) &&
                      oo_arena_window_at(&arena, unit * OO_ALIGNMENT, OO_ALIGNMENT, &window),
                  "unit %u", unit);
            oo_arena_take(&arena, &window, OO_ALIGNMENT, unit);
        }
        for (uint64_t later_than = 0; later_than < 2; later_than++) {
            struct oo_search search = {OO_ALIGNMENT, later_than, use_of_three,
                                       uses[order],  0,          &window};
            CHECK(oo_arena_find(&arena, &search) && uses[order][window.first->unit] == 9 &&
                      window.first == window.last,
                  "order %d, later than %d: the place of unit %u", order, (int)later_than,
                  window.first->unit);
        }
        oo_arena_clear(&arena);
    }
}

static void place_at(struct oo_arena *arena, uint32_t unit, size_t position, size_t bytes) {
    struct oo_window window;
    CHECK(oo_arena_reserve(arena) && oo_arena_window_at(arena, position, bytes, &window), "unit %u",
          unit);
    oo_arena_take(arena, &window, bytes, unit);
}

/* Of windows whose occupants are all fair to evict, the one with the fewest bytes of them, though
 * another is needed later. */
CASE(test_the_fewest_bytes_make_place) {
    enum { A = OO_ALIGNMENT };
    static const uint64_t uses[] = {5, 9, 7};
    struct oo_arena arena = {0};
    struct oo_segment *segment;
    struct oo_window window;
    CHECK(oo_arena_add(&arena, 1 << 20, 6 * A, 0, 0, &segment) == OO_OK, "segment");
    place_at(&arena, 0, 0, A);
    place_at(&arena, 1, A, 3 * A);
    place_at(&arena, 2, 4 * A, 2 * A);
    struct oo_search search = {A, 1, use_of_three, uses, 0, &window};
    CHECK(oo_arena_find(&arena, &search) && window.first->unit == 0 && window.last == window.first,
          "the place of unit %u", window.first->unit);
    oo_arena_clear(&arena);
}

/* What is left over is then where the next placement will be. */
CASE(test_a_unit_lies_against_its_newer_neighbour) {
    enum { A = OO_ALIGNMENT };
    for (uint32_t newer = 0; newer < 2; newer++) {
        struct oo_arena arena = {0};
        struct oo_segment *segment;
        struct oo_window window;
        CHECK(oo_arena_add(&arena, 1 << 20, 4 * A, 0, 0, &segment) == OO_OK, "segment");
        place_at(&arena, 1 - newer, newer ? 0 : 3 * A, A);
        place_at(&arena, newer, newer ? 3 * A : 0, A);
        CHECK(oo_arena_reserve(&arena) && oo_arena_find_free(&arena, A, &window), "room");
        const struct oo_block *block = oo_arena_take(&arena, &window, A, 2);
        CHECK(block->offset == (newer ? 2 : 1) * (size_t)A, "at %zu, the newer one is %s",
              block->offset, newer ? "above" : "below");
        oo_arena_clear(&arena);
    }
}

/* A position counts through all segments; what does not fit in the rest of one begins elsewhere. */
CASE(test_positions_count_through_the_segments) {
    enum { A = OO_ALIGNMENT };
    struct oo_arena arena = {0};
    struct oo_segment *segment;
    struct oo_window window;
    for (uintptr_t i = 1; i <= 2; i++)
        CHECK(oo_arena_add(&arena, i << 20, 4 * A, 0, 0, &segment) == OO_OK, "segment");
    CHECK(oo_arena_fit(&arena, 2 * A, 2 * A) == 2 * A, "in the first");
    CHECK(oo_arena_fit(&arena, 3 * A, 2 * A) == 4 * A, "in the second, from its begin");
    CHECK(oo_arena_fit(&arena, 6 * A, 2 * A) == 6 * A, "in the second");
    CHECK(oo_arena_fit(&arena, 7 * A, 2 * A) == 0, "around the end");
    CHECK(oo_arena_fit(&arena, 0, 5 * A) == 0, "in none");
    CHECK(oo_arena_fit_below(&arena, 8 * A, 2 * A) == 6 * A, "at the end");
    CHECK(oo_arena_fit_below(&arena, 7 * A, 3 * A) == 4 * A, "in the second, from its begin");
    CHECK(oo_arena_fit_below(&arena, 6 * A, 3 * A) == A, "at the end of the first");
    CHECK(oo_arena_fit_below(&arena, 4 * A, A) == 3 * A, "in the first");
    CHECK(oo_arena_fit_below(&arena, A, 2 * A) == OO_ANYWHERE, "below the begin");
    CHECK(oo_arena_fit_below(&arena, 8 * A, 5 * A) == OO_ANYWHERE, "in none");
    CHECK(oo_arena_fit_below(&arena, 9 * A, 2 * A) == 6 * A, "of an end beyond the last");
    CHECK(oo_arena_window_at(&arena, 6 * A, 2 * A, &window) && window.skip == 2 * A, "a window");
    CHECK(!oo_arena_window_at(&arena, 7 * A, 2 * A, &window), "over the end of the second");
    CHECK(!oo_arena_window_at(&arena, 8 * A, A, &window), "beyond the end");
    oo_arena_clear(&arena);
    CHECK(!oo_arena_window_at(&arena, 0, A, &window), "in nothing");
}

CASE(test_random_traces_keep_the_arena_sound) {
    static struct model m;
    for (unsigned seed = 1; seed <= 200; seed++) {
        srand(seed);
        m = (struct model){0};
        m.n = 2 + (unsigned)rand() % 40;
        for (unsigned i = 0; i < m.n; i++) {
            m.bytes[i] = aligned((size_t)(1 + rand() % 5000));
            m.total += m.bytes[i];
            if (m.bytes[i] > m.largest)
                m.largest = m.bytes[i];
        }
        struct oo_plan *plan = plan_of(&m, aligned(m.largest + (size_t)rand() % m.total));
        struct oo_segment *second;
        if (rand() % 2)
            CHECK(oo_arena_add(oo_plan_arena(plan), 1 << 28, aligned(m.largest), 1, 0, &second) ==
                      OO_OK,
                  "segment");
        const unsigned before = (unsigned)check_failed;
        for (int i = 0; i < 300; i++) {
            struct visit visit = {(uint32_t)rand() % m.n, (enum oo_kind)(rand() % 4)};
            run(plan, &m, &visit, 1);
            if (rand() % 8 == 0)
                oo_plan_drop(plan, (uint32_t)rand() % m.n);
            if (rand() % 16 == 0)
                oo_plan_allow(plan, (uint32_t)rand() % m.n, rand() % 2);
            check_arena(plan, m.n);
        }
        if (check_failed != before)
            fprintf(stderr, "seed %u\n", seed);
        oo_plan_destroy(plan);
    }
}

/* The trace is a ring: a match must survive its wrapping, and never read what was overwritten. */
CASE(test_the_trace_wraps) {
    static struct model m;
    flux(&m, 3072, 1);
    const size_t capacity = aligned(m.total / 2);
    struct oo_plan *plan = plan_of(&m, capacity);
    struct outcome last = {0, 0};
    for (int step = 0; step < 80; step++) /* 80 steps of 1,026 visits: once around and more */
        last = run(plan, &m, m.step, m.n_visits);
    CHECK(last.late == 0 && last.bytes * 100 <= x_min(&m, capacity) * 101, "%u late, %zu bytes",
          last.late, last.bytes);
    const uint64_t end = oo_plan_end_of_visits(plan);
    const struct oo_visit visit = oo_plan_visit_at(plan, end - 1);
    CHECK(end == 80 * m.n_visits && oo_plan_first_visit(plan) == end - 65535,
          "the latest visits are remembered");
    CHECK(visit.unit == m.step[m.n_visits - 1].unit && visit.kind == OO_BACKWARD, "the last one");
    oo_plan_destroy(plan);
}

/* Every other unit is in memory, of those that are in between where the arena does not keep them
 * over a turn. */
static int is_near(const struct model *m, size_t capacity, unsigned unit) {
    size_t begin = 0;
    for (unsigned i = 0; i < unit; i++)
        begin += m->bytes[i];
    return unit % 2 && begin >= capacity && begin + m->bytes[unit] + capacity <= m->total;
}

/* One step of the units from `base` on. Bytes of what is fetched from a disk, and the most of what
 * is in memory that the arena holds at any time. */
struct kinds {
    size_t far, near;
};

static struct kinds run_kinds(struct oo_plan *plan, const struct model *m, uint32_t base,
                              const char *near) {
    struct kinds kinds = {0, 0};
    for (unsigned i = 0; i < m->n_visits; i++) {
        const uint32_t unit = base + m->step[i].unit;
        struct oo_window window;
        uint32_t fetch = unit;
        size_t held = 0;
        oo_plan_visit(plan, unit, m->step[i].kind);
        int is_next = !oo_plan_resident(plan, unit) && oo_plan_place(plan, unit, &window);
        CHECK(is_next || oo_plan_resident(plan, unit), "no place for unit %u", unit);
        oo_plan_pin(plan, unit);
        while (is_next || oo_plan_next_fetch(plan, OO_TAPES, &fetch, &window)) {
            oo_plan_take(plan, fetch, &window);
            kinds.far += fetch < base || near[fetch - base] ? 0 : m->bytes[fetch - base];
            is_next = 0;
        }
        oo_plan_unpin(plan, unit);
        for (unsigned k = 0; k < m->n; k++)
            held += near[k] && oo_plan_resident(plan, base + k) ? m->bytes[k] : 0;
        kinds.near = held > kinds.near ? held : kinds.near;
    }
    return kinds;
}

/* Another model's, which rests. */
static void add_others(struct oo_plan *plan, unsigned count, size_t bytes) {
    uint32_t unit;
    for (unsigned i = 0; i < count; i++) {
        CHECK(oo_plan_unit_add(plan, bytes, &unit) == OO_OK, "unit");
        oo_plan_far(plan, unit, 1);
    }
}

/* What is in memory can come at any time, so that it leaves the arena to what is on a disk: for
 * that is read ahead as far as there is room, and at a turn all of the arena keeps some of it. */
CASE(test_what_is_on_a_disk_has_most_of_the_arena) {
    static struct model m;
    static char near[MAX_UNITS];
    for (int way = 0; way < 10; way++) {
        const int percent = 12 + way / 2 * 4, are_first = way % 2;
        const uint32_t base = are_first ? 40 : 0;
        flux(&m, 3072, way % 3 > 0);
        const size_t capacity = m.total / 100 * (size_t)percent;
        struct oo_plan *plan;
        size_t in_memory = 0, largest = 0;
        CHECK(oo_plan_create(&plan) == OO_OK, "plan");
        add_segment(plan, 1 << 20, capacity);
        add_others(plan, base, m.largest);
        for (unsigned i = 0; i < m.n; i++) {
            uint32_t unit;
            near[i] = (char)is_near(&m, capacity, i);
            CHECK(oo_plan_unit_add(plan, m.bytes[i], &unit) == OO_OK && unit == base + i, "unit");
            oo_plan_far(plan, unit, !near[i]);
            in_memory += near[i] ? m.bytes[i] : 0;
            largest = near[i] && m.bytes[i] > largest ? m.bytes[i] : largest;
        }
        add_others(plan, 40 - base, m.largest);
        struct kinds kinds = {0, 0};
        for (int i = 0; i < 4; i++)
            kinds = run_kinds(plan, &m, base, near);
        const size_t least = 2 * (m.total - in_memory - capacity);
        CHECK(kinds.far >= least && kinds.far <= least + least / 100,
              "at %d%% %.3f of the least is read", percent, (double)kinds.far / (double)least);
        CHECK(kinds.near >= 2 * largest && kinds.near <= 3 * largest,
              "at %d%% the arena holds %.1f of the largest in memory", percent,
              (double)kinds.near / (double)largest);
        oo_plan_destroy(plan);
    }
}

CHECK_MAIN(NULL)
