/* Bytes become calls on a plan. After each one the arena must tile its segments, the plan's map of
 * what is resident must be the arena's, nothing pinned may have gone, and every decision must keep
 * its word. */
#include "fuzz.h"

#include "plan.h"

enum { MAX_UNITS = 48, MAX_SEGMENTS = 4, GRAIN = 256 };

struct model {
    struct oo_plan *plan;
    struct oo_segment *segments[MAX_SEGMENTS];
    unsigned n_segments, n_units;
    struct {
        size_t bytes;
        unsigned pins;
        int resident, removed, ahead;
    } units[MAX_UNITS];
    uint64_t visits;
    uint32_t current;
};

static int listed(const struct model *m, const struct oo_segment *segment) {
    for (unsigned i = 0; i < m->n_segments; i++)
        if (m->segments[i] == segment)
            return 1;
    return 0;
}

static void check_invariants(const struct model *m) {
    const struct oo_arena *arena = oo_plan_arena(m->plan);
    size_t used = 0, total = 0;
    unsigned found = 0, segments = 0, resident = 0;
    uint32_t seen[MAX_UNITS] = {0};
    for (const struct oo_segment *s = arena->segments; s; s = s->next, segments++) {
        REQUIRE(listed(m, s), "a segment that was never added");
        size_t offset = 0;
        int near = 0;
        const struct oo_block *before = NULL;
        for (const struct oo_block *b = s->first; b; before = b, b = b->next) {
            near += b == s->near;
            REQUIRE(b->previous == before && b->segment == s, "broken links");
            REQUIRE(b->offset == offset && b->bytes > 0, "block at %zu of %zu bytes, not at %zu",
                    b->offset, b->bytes, offset);
            offset += b->bytes;
            if (b->unit == OO_NO_UNIT) {
                REQUIRE(!before || before->unit != OO_NO_UNIT, "two free blocks side by side");
                REQUIRE(b->placed == 0, "a free block that was placed");
                REQUIRE(b->bytes <= arena->free_most, "%zu bytes are free, at most %zu", b->bytes,
                        arena->free_most);
                continue;
            }
            REQUIRE(b->unit < m->n_units && !seen[b->unit]++, "unit %u is unknown or twice there",
                    b->unit);
            REQUIRE(b->bytes == m->units[b->unit].bytes, "unit %u has %zu bytes, not %zu", b->unit,
                    b->bytes, m->units[b->unit].bytes);
            REQUIRE(oo_plan_resident(m->plan, b->unit) == b,
                    "the plan does not know unit %u's block", b->unit);
            used += b->bytes;
            found++;
        }
        REQUIRE(near == 1, "searches begin at a block that is gone");
        REQUIRE(offset == s->bytes, "blocks end at %zu of %zu", offset, s->bytes);
        total += s->bytes;
    }
    for (uint32_t u = 0; u < m->n_units; u++) {
        REQUIRE((oo_plan_resident(m->plan, u) != NULL) == m->units[u].resident,
                "unit %u: resident %d", u, m->units[u].resident);
        REQUIRE(oo_plan_pins(m->plan, u) == m->units[u].pins, "unit %u: %u pins", u,
                m->units[u].pins);
        REQUIRE(!m->units[u].pins || m->units[u].resident, "unit %u is pinned and gone", u);
        resident += m->units[u].resident != 0;
    }
    REQUIRE(found == resident && segments == m->n_segments, "%u of %u units", found, resident);
    REQUIRE(used == arena->used_bytes && total == arena->total_bytes,
            "%zu of %zu bytes used, counted %zu of %zu", used, total, arena->used_bytes,
            arena->total_bytes);
}

/* Whether consecutive unpinned blocks of one segment have the bytes: found the slow and simple way.
 */
static int could_place(const struct model *m, size_t bytes) {
    for (const struct oo_segment *s = oo_plan_arena(m->plan)->segments; s; s = s->next) {
        size_t run = 0;
        for (const struct oo_block *b = s->first; b; b = b->next) {
            run = b->unit != OO_NO_UNIT && m->units[b->unit].pins ? 0 : run + b->bytes;
            if (run >= bytes)
                return 1;
        }
    }
    return 0;
}

/* Carry out a placement after looking at what it evicts, none of it used by `before` visits from
 * now. */
static void take(struct model *m, uint32_t unit, const struct oo_window *window, uint64_t before) {
    size_t bytes = 0;
    for (const struct oo_block *b = window->first;; b = b->next) {
        REQUIRE(b && b->segment == window->first->segment, "a window that leaves its segment");
        bytes += b->bytes;
        if (b->unit != OO_NO_UNIT) {
            REQUIRE(m->units[b->unit].pins == 0, "unit %u is pinned and would be evicted", b->unit);
            REQUIRE(b->unit != unit, "unit %u evicts itself", unit);
            const uint64_t next = oo_plan_next_use(m->plan, b->unit);
            REQUIRE(next > before, "unit %u, used in %llu, is evicted for one used in %llu",
                    b->unit, (unsigned long long)next, (unsigned long long)before);
            m->units[b->unit].resident = 0;
        }
        if (b == window->last)
            break;
    }
    REQUIRE(bytes == window->bytes && bytes >= m->units[unit].bytes,
            "a window of %zu bytes counted as %zu", bytes, window->bytes);
    const struct oo_segment *segment = window->first->segment;
    const struct oo_block *block = oo_plan_take(m->plan, unit, window);
    REQUIRE(block && block->unit == unit && block->segment == segment, "unit %u was put elsewhere",
            unit);
    REQUIRE(oo_block_address(block) % GRAIN == segment->base % GRAIN, "unit %u is not aligned",
            unit);
    m->units[unit].resident = 1;
}

static void visit(struct model *m, uint32_t unit, enum oo_kind kind) {
    oo_plan_visit(m->plan, unit, kind);
    m->current = unit;
    m->visits++;
}

/* As the engine does: visit, place what is absent. A place is refused only where there is none. */
static void demand(struct model *m, uint32_t unit, enum oo_kind kind) {
    struct oo_window window;
    visit(m, unit, kind);
    if (m->units[unit].resident)
        return;
    const int possible = could_place(m, m->units[unit].bytes);
    const int placed = oo_plan_place(m->plan, unit, &window);
    REQUIRE(placed == possible, "unit %u: placed %d, possible %d", unit, placed, possible);
    if (placed)
        take(m, unit, &window, 0);
}

/* What leaves is there, and is not in use. */
static void leave(struct model *m) {
    uint32_t unit;
    while (oo_plan_next_drop(m->plan, &unit)) {
        REQUIRE(unit < m->n_units && m->units[unit].resident && !m->units[unit].pins,
                "unit %u leaves", unit);
        oo_plan_drop(m->plan, unit);
        m->units[unit].resident = 0;
    }
}

/* Fetches end by themselves; each is of a unit that wants one, and evicts nothing that is needed
 * before. */
static void fetch(struct model *m, unsigned most) {
    uint32_t unit;
    struct oo_window window;
    const uint64_t bound = 2 * m->visits + 4 * MAX_UNITS;
    uint64_t done = 0;
    leave(m);
    while (done < most && oo_plan_next_fetch(m->plan, OO_TAPES, &unit, &window)) {
        REQUIRE(unit < m->n_units, "unit %u does not exist", unit);
        REQUIRE(!m->units[unit].resident && !m->units[unit].removed && m->units[unit].ahead,
                "unit %u is fetched: resident %d, removed %d, allowed %d", unit,
                m->units[unit].resident, m->units[unit].removed, m->units[unit].ahead);
        take(m, unit, &window, oo_plan_next_use(m->plan, unit));
        REQUIRE(++done < bound, "fetching does not end");
    }
}

static void add_unit(struct model *m, unsigned grains) {
    uint32_t unit;
    if (m->n_units == MAX_UNITS)
        return;
    REQUIRE(oo_plan_unit_add(m->plan, (size_t)grains * GRAIN, &unit) == OO_OK && unit == m->n_units,
            "no unit");
    m->units[unit].bytes = (size_t)grains * GRAIN;
    m->units[unit].ahead = 1;
    m->n_units++;
}

static void add_segment(struct model *m, unsigned grains) {
    if (m->n_segments == MAX_SEGMENTS)
        return;
    const uintptr_t base = (uintptr_t)(m->n_segments + 1) << 32;
    REQUIRE(oo_arena_add(oo_plan_arena(m->plan), base, (size_t)grains * GRAIN, 0, 0,
                         &m->segments[m->n_segments]) == OO_OK,
            "no segment");
    m->n_segments++;
}

static void remove_segment(struct model *m, unsigned which) {
    struct oo_segment *segment = m->segments[which];
    for (const struct oo_block *b = segment->first; b; b = b->next)
        if (b->unit != OO_NO_UNIT && m->units[b->unit].pins)
            return;
    for (uint32_t u = 0; u < m->n_units; u++) {
        const struct oo_block *block = oo_plan_resident(m->plan, u);
        if (block && block->segment == segment) {
            oo_plan_drop(m->plan, u);
            m->units[u].resident = 0;
        }
    }
    oo_arena_remove(oo_plan_arena(m->plan), segment);
    m->segments[which] = m->segments[--m->n_segments];
}

/* One training step over the units that are left, or one of sampling. */
static void step(struct model *m, int backward, unsigned most) {
    for (uint32_t u = 0; u < m->n_units; u++)
        if (!m->units[u].removed) {
            demand(m, u, OO_FORWARD);
            fetch(m, most);
        }
    for (uint32_t u = m->n_units; backward && u-- > 0;)
        if (!m->units[u].removed) {
            demand(m, u, OO_RECOMPUTE);
            fetch(m, most);
            demand(m, u, OO_BACKWARD);
            fetch(m, most);
        }
}

static void one_call(struct model *m, struct input *in) {
    const unsigned call = below(in, 16);
    const uint32_t unit = m->n_units ? below(in, m->n_units) : 0;
    const enum oo_kind kind = (enum oo_kind)below(in, 4);
    struct oo_window window;
    if (call == 0) {
        add_unit(m, 1 + below(in, 40));
        return;
    }
    if (call == 1) {
        add_segment(m, 1 + below(in, 200));
        return;
    }
    if (call == 2) {
        if (m->n_segments > 1 && below(in, 4) == 0)
            remove_segment(m, below(in, m->n_segments));
        return;
    }
    if (!m->n_units || m->units[unit].removed)
        return;
    switch (call) {
    case 3:
        if (!m->units[unit].pins && below(in, 4) == 0) {
            oo_plan_drop(m->plan, unit);
            oo_plan_unit_remove(m->plan, unit);
            m->units[unit].resident = 0;
            m->units[unit].removed = 1;
        }
        break;
    case 4:
        visit(m, unit, kind);
        break;
    case 5:
        if (!m->units[unit].pins) {
            oo_plan_drop(m->plan, unit);
            m->units[unit].resident = 0;
        }
        break;
    case 6:
        if (m->units[unit].resident && m->units[unit].pins < 4) {
            oo_plan_pin(m->plan, unit);
            m->units[unit].pins++;
        }
        break;
    case 7:
    case 8:
        if (m->units[unit].pins) {
            oo_plan_unpin(m->plan, unit);
            m->units[unit].pins--;
        }
        break;
    case 9:
        m->units[unit].ahead = (int)below(in, 2);
        oo_plan_allow(m->plan, unit, m->units[unit].ahead);
        break;
    case 10:
        fetch(m, 1 + below(in, 8));
        break;
    case 11: /* without the visit that the engine makes: what is placed is placed well all the same
              */
        if (!m->units[unit].resident && oo_plan_place(m->plan, unit, &window)) {
            REQUIRE(could_place(m, m->units[unit].bytes), "unit %u is placed where nothing can be",
                    unit);
            take(m, unit, &window, 0);
        }
        break;
    case 12: {
        const unsigned steps = 1 + below(in, 8), backward = below(in, 2), most = below(in, 5);
        for (unsigned i = 0; i < steps && m->visits < 8000; i++)
            step(m, (int)backward, most);
        break;
    }
    case 13: /* past the end of what is remembered, now and then; a cycle, as its prediction is
                cheap */
        if (below(in, 16) == 0 && m->visits < 8000)
            for (unsigned n = 1u << below(in, 18); n-- > 0 && (m->n_units > 2 || m->visits < 8000);)
                visit(m, n % m->n_units, OO_FORWARD);
        break;
    default:
        demand(m, unit, kind);
        fetch(m, below(in, 4));
        break;
    }
    if ((kind == OO_FORWARD || kind == OO_RECORDED) && call < 8) {
        oo_plan_took(m->plan, unit, (double)below(in, 100) / 10);
        oo_plan_copied(m->plan, unit, below(in, 4) * GRAIN, 0.5);
    }
    (void)oo_plan_block_bytes(m->plan);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};
    struct model m;
    memset(&m, 0, sizeof m);
    REQUIRE(oo_plan_create(&m.plan) == OO_OK, "no plan");
    add_segment(&m, 16 + below(&in, 256));
    for (unsigned n = below(&in, 24); n-- > 0;)
        add_unit(&m, 1 + below(&in, 24));
    while (in.left) {
        one_call(&m, &in);
        check_invariants(&m);
    }
    oo_plan_destroy(m.plan);
    return 0;
}
