/* stats.c - one snapshot of what was counted, and of what is in the arena. */
#include "disk.h"
#include "feed.h"
#include "ring.h"
#include "staging.h"
#include "timing.h"

static void oo__add_model(struct oo_stats *sum, const struct oo_stats *model) {
#define OO_ADD_MODEL(name) sum->name += model->name;
#define OO_ADD_ENGINE(name)
#define OO_ADD_NOW(name)
#define OO_ADD(name, of) OO_ADD_##of(name)
    OO_COUNTERS(OO_ADD, OO_ADD);
#undef OO_ADD
#undef OO_ADD_NOW
#undef OO_ADD_ENGINE
#undef OO_ADD_MODEL
}

static void oo__add_unit(const struct oo_engine *engine, struct oo_stats *sum, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    sum->units++;
    sum->managed_bytes += unit->device_bytes;
    if (unit->device_bytes > sum->largest_unit_bytes)
        sum->largest_unit_bytes = unit->device_bytes;
    if (oo_plan_resident(engine->plan, id)) {
        sum->resident_units++;
        sum->resident_bytes += unit->device_bytes;
    }
    const struct oo_kept *counted = NULL;
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        const struct oo_part *part = &unit->parts[i];
        if (part->kept) {
            if (part->kept == counted) /* another chunk of the same */
                continue;
            counted = part->kept;
            sum->disk_kept_bytes += part->kept->bytes;
            sum->disk_arrived_bytes += part->kept->arrived;
        } else if (oo__disk_of(part))
            sum->disk_bytes += part->bytes;
        else if (!part->locked)
            sum->pageable_bytes += part->bytes;
    }
}

enum oo_status oo_engine_stats(struct oo_engine *engine, uint32_t model, struct oo_stats *out) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    if (model != OO_ALL_MODELS && (model >= engine->n_models || engine->models[model].removed)) {
        status = oo__fail(OO_E_ARGUMENT, "model %u is not attached", model);
        goto done;
    }
    oo__feeds_count(engine);
    if (engine->usable)
        oo__spans_harvest(engine);
    *out = engine->stats;
    for (uint32_t i = 0; i < engine->n_models; i++)
        if (model == OO_ALL_MODELS || model == i)
            oo__add_model(out, &engine->models[i].stats);
    for (uint32_t i = 0; i < engine->n_units; i++)
        if (!engine->units[i].removed &&
            (model == OO_ALL_MODELS || engine->units[i].model == model))
            oo__add_unit(engine, out, i);
    for (const struct oo_known *known = engine->known; known; known = known->next)
        if (known->registration)
            out->locked_bytes += known->registration->bytes;
    out->ring_bytes = oo__ring_bytes(&engine->up) + oo__ring_bytes(&engine->down);
    out->locked_bytes += out->ring_bytes;
    out->arena_bytes = oo_plan_arena(engine->plan)->total_bytes;
    out->staging_bytes = oo__staging_bytes(engine);
    out->learned_block_bytes = oo_plan_block_bytes(engine->plan);
    out->allocations += oo_plan_allocations(engine->plan);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_engine_residents(struct oo_engine *engine, struct oo_resident *rows,
                                   size_t capacity, size_t *count) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    *count = 0;
    for (const struct oo_segment *segment = oo_plan_arena(engine->plan)->segments; segment;
         segment = segment->next) {
        for (const struct oo_block *block = segment->first; block; block = block->next) {
            if (block->unit == OO_NO_UNIT)
                continue;
            if (*count < capacity)
                rows[*count] =
                    (struct oo_resident){block->unit, oo_plan_pins(engine->plan, block->unit),
                                         oo_block_address(block), block->bytes};
            ++*count;
        }
    }
    oo__leave(engine);
    return OO_OK;
}

enum oo_status oo_engine_unit_waits(struct oo_engine *engine, struct oo_unit_waits *rows,
                                    size_t capacity, size_t *count) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    *count = 0;
    for (uint32_t i = 0; i < engine->n_units; i++) {
        const struct oo_unit *unit = &engine->units[i];
        if (unit->removed || !unit->timed_waits)
            continue;
        if (*count < capacity)
            rows[*count] =
                (struct oo_unit_waits){i, unit->timed_waits, unit->stalls, unit->stall_seconds};
        ++*count;
    }
    oo__leave(engine);
    return OO_OK;
}
