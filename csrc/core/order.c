/* order.c - the order in which units are used, and the seconds they take: given to the caller, and
 * taken from an earlier run. */
#include "timing.h"

enum oo_status oo_engine_visits(struct oo_engine *engine, uint32_t model, struct oo_visit *visits,
                                size_t capacity, size_t *count) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD | OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    *count = 0;
    const uint64_t end = oo_plan_end_of_visits(engine->plan);
    for (uint64_t i = oo_plan_first_visit(engine->plan); i < end; i++) {
        const struct oo_visit visit = oo_plan_visit_at(engine->plan, i);
        if (engine->units[visit.unit].model != model)
            continue;
        if (*count < capacity)
            visits[*count] = visit;
        ++*count;
    }
    oo__leave(engine);
    return OO_OK;
}

static enum oo_status oo__check_visits(const struct oo_engine *engine,
                                       const struct oo_visit *visits, size_t count) {
    if (count == 0 || count > OO_MAX_EXPECTED)
        return oo__fail(OO_E_ARGUMENT, "%zu uses are expected; there may be 1 to %d", count,
                        OO_MAX_EXPECTED);
    for (size_t i = 0; i < count; i++) {
        const uint32_t unit = visits[i].unit;
        if (unit >= engine->n_units || engine->units[unit].removed)
            return oo__fail(OO_E_ARGUMENT, "unit %u, which is expected, does not exist", unit);
        if ((unsigned)visits[i].kind > OO_RECORDED)
            return oo__fail(OO_E_ARGUMENT, "a use of kind %d is expected", (int)visits[i].kind);
    }
    return OO_OK;
}

enum oo_status oo_engine_expect(struct oo_engine *engine, const struct oo_visit *visits,
                                size_t count) {
    enum oo_status status = oo__enter(engine, OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    status = oo__check_visits(engine, visits, count);
    if (status == OO_OK)
        oo_plan_expect(engine->plan, visits, count);
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_pace(struct oo_engine *engine, uint32_t model, struct oo_unit_pace *rows,
                              size_t capacity, size_t *count, uint64_t *link_bps) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    if (engine->usable)
        oo__spans_harvest(engine);
    *link_bps = (uint64_t)oo_plan_link_bps(engine->plan);
    *count = 0;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        const uint64_t nanoseconds = (uint64_t)(oo_plan_seconds(engine->plan, i) * 1e9 + 0.5);
        if (engine->units[i].model != model || !nanoseconds) /* or gone: those have none */
            continue;
        if (*count < capacity)
            rows[*count] = (struct oo_unit_pace){i, nanoseconds};
        ++*count;
    }
    oo__leave(engine);
    return OO_OK;
}

static enum oo_status oo__check_pace(const struct oo_engine *engine,
                                     const struct oo_unit_pace *rows, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (rows[i].unit >= engine->n_units || engine->units[rows[i].unit].removed)
            return oo__fail(OO_E_ARGUMENT, "unit %u, whose seconds are expected, does not exist",
                            rows[i].unit);
    return OO_OK;
}

enum oo_status oo_engine_expect_pace(struct oo_engine *engine, const struct oo_unit_pace *rows,
                                     size_t count, uint64_t link_bps) {
    enum oo_status status = oo__enter(engine, OO__WITHOUT_DRIVER);
    if (status != OO_OK)
        return status;
    status = oo__check_pace(engine, rows, count);
    for (size_t i = 0; status == OO_OK && i < count; i++)
        oo_plan_expect_seconds(engine->plan, rows[i].unit, (double)rows[i].nanoseconds / 1e9);
    if (status == OO_OK && link_bps)
        oo_plan_expect_link(engine->plan, (double)link_bps);
    oo__leave(engine);
    return status;
}
