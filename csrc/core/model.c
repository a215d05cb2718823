/* model.c - what is managed: models, units, members. */
#include "model.h"
#include "call.h"
#include "disk.h"
#include "feed.h"
#include "masters.h"
#include "simulated.h"
#include "timing.h"
#include "uses.h"

#include <stdlib.h>
#include <string.h>

static size_t oo__align(size_t bytes) {
    return (bytes + OO_ALIGNMENT - 1) / OO_ALIGNMENT * OO_ALIGNMENT;
}

/* Room for one more element; `array` and `capacity` are updated together. */
static enum oo_status oo__grow(struct oo_engine *engine, void **array, uint32_t *capacity,
                               uint32_t count, size_t element_bytes) {
    if (count < *capacity)
        return OO_OK;
    const uint32_t larger = *capacity ? 2 * *capacity : 64;
    void *grown = realloc(*array, larger * element_bytes);
    if (!grown)
        return oo__fail(OO_E_MEMORY, "no memory for %u records of %zu bytes", larger,
                        element_bytes);
    *array = grown;
    *capacity = larger;
    engine->stats.allocations++;
    return OO_OK;
}

/* ---- models ---- */

static enum oo_status oo__need_model(const struct oo_engine *engine, uint32_t model) {
    if (model >= engine->n_models || engine->models[model].removed)
        return oo__fail(OO_E_ARGUMENT, "model %u is not attached", model);
    return OO_OK;
}

enum oo_status oo_model_add(struct oo_engine *engine, uint32_t *model) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    void *models = engine->models;
    OO_TRY(oo__grow(engine, &models, &engine->model_capacity, engine->n_models,
                    sizeof *engine->models));
    engine->models = models;
    engine->models[engine->n_models] = (struct oo_model){0};
    *model = engine->n_models++;
done:
    oo__leave(engine);
    return status;
}

static void oo__unit_remove(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    oo_plan_unit_remove(engine->plan, id);
    for (uint32_t i = 0; i < unit->n_members; i++) {
        struct oo_member *member = &engine->members[unit->members[i]];
        free(member->tensors);
        member->tensors = NULL;
        member->removed = 1;
    }
    free(unit->parts);
    free(unit->members);
    free(unit->feed);
    unit->parts = NULL;
    unit->members = NULL;
    unit->feed = NULL;
    unit->n_parts = unit->n_members = 0;
    unit->removed = 1;
}

enum oo_status oo_model_remove(struct oo_engine *engine, uint32_t model) {
    enum oo_status status = oo__enter(engine, OO__EVEN_DEAD);
    if (status != OO_OK)
        return status;
    OO_TRY(oo__need_model(engine, model));
    for (uint32_t i = 0; i < engine->n_units; i++) {
        if (engine->units[i].model == model && oo_plan_pins(engine->plan, i)) {
            status = oo__fail_in_use(i);
            goto done;
        }
    }
    for (uint32_t i = 0; i < engine->n_units; i++)
        if (engine->units[i].model == model)
            oo__feed_stop(engine, i);
    if (engine->usable) {
        /* H7: the masters are the caller's again, while copies of them, or kernels that read them,
         * may still be queued. */
        OO_TRY(oo__synchronize(engine, engine->h2d, 0));
        OO_TRY(oo__await_reads(engine));
    }
    for (uint32_t i = 0; i < engine->n_units; i++) {
        if (engine->units[i].model != model)
            continue;
        OO_TRY(oo__drop(engine, i));
        oo__unit_remove(engine, i);
    }
    engine->models[model].removed = 1;
done:
    oo__leave(engine);
    return status;
}

/* ---- units ---- */

/* ---- parts ---- */

/* What is made of a unit's tensors. With `parts` NULL it is only counted. */
struct oo_parts_made {
    struct oo_part *parts;
    uint32_t count, room;
};

/* Tensors in a row travel as one copy when the host layout equals the device layout, and nothing
 * has left the unit between them. Not of a file, of which memory may keep some. */
static void oo__part_of_plain(const struct oo_engine *engine, const struct oo_member_tensor *tensor,
                              struct oo_parts_made *made) {
    const struct oo_known *memory = oo__known_memory(engine, tensor->host, tensor->bytes);
    const int locked = oo__is_locked(memory, tensor->host, tensor->bytes);
    struct oo_part *last = made->parts && made->count ? &made->parts[made->count - 1] : NULL;
    if (last && memory && last->memory == memory && last->locked == locked && !last->header.mode &&
        !memory->host->disk && tensor->offset == oo__align(last->offset + last->bytes) &&
        tensor->host - last->host == (ptrdiff_t)(tensor->offset - last->offset)) {
        last->bytes = tensor->offset - last->offset + tensor->bytes;
        return;
    }
    if (made->parts)
        made->parts[made->count] = (struct oo_part){.host = tensor->host,
                                                    .bytes = tensor->bytes,
                                                    .offset = tensor->offset,
                                                    .memory = memory,
                                                    .locked = locked};
    made->count++;
}

static enum oo_status oo__fail_coded(const struct oo_member_tensor *tensor, size_t at,
                                     const char *what) {
    return oo__fail(OO_E_ARGUMENT, "a coded tensor of %zu bytes in %zu, its chunk at %zu: %s",
                    tensor->bytes, tensor->coded_bytes, at, what);
}

/* One part for each chunk: what of it travels. */
static enum oo_status oo__parts_of_coded(const struct oo_engine *engine,
                                         const struct oo_member_tensor *tensor,
                                         struct oo_parts_made *made) {
    const size_t width = oo_codec_weight_bytes(tensor->coded_kind);
    size_t at = 0, decoded = 0, bytes;
    while (decoded < tensor->bytes) {
        struct oo_codec_header header;
        const char *chunk = tensor->host + at;
        if (at >= tensor->coded_bytes)
            return oo__fail_coded(tensor, at, "there are too few");
        if (made->parts && made->count == made->room)
            return oo__fail_coded(tensor, at, "has been rewritten meanwhile");
        if (oo_codec_find(chunk, tensor->coded_bytes - at, &header, &bytes) != OO_OK) {
            const struct oo_error cause = oo__error_save();
            return oo__fail_coded(tensor, at, cause.message);
        }
        const size_t weights = header.count * width;
        if (header.kind != tensor->coded_kind)
            return oo__fail_coded(tensor, at, "is of another kind");
        if (weights > tensor->bytes - decoded ||
            (weights < tensor->bytes - decoded && header.count % OO_CODEC_BLOCK))
            return oo__fail_coded(tensor, at, "has a number of weights that does not fit");
        const struct oo_known *memory = oo__known_memory(engine, chunk, bytes);
        const size_t skipped = oo_codec_skipped(&header);
        if (made->parts)
            made->parts[made->count] =
                (struct oo_part){.host = chunk + skipped,
                                 .bytes = bytes - skipped,
                                 .offset = tensor->offset + decoded,
                                 .memory = memory,
                                 .locked = oo__is_locked(memory, chunk, bytes),
                                 .header = header};
        made->count++;
        decoded += weights;
        at += oo__align(bytes);
    }
    if (tensor->coded_bytes > at)
        return oo__fail_coded(tensor, at, "there are too many");
    return OO_OK;
}

static enum oo_status oo__parts_of(const struct oo_engine *engine, const uint32_t *members,
                                   uint32_t n_members, struct oo_parts_made *made) {
    enum oo_status status = OO_OK;
    made->count = 0;
    for (uint32_t i = 0; i < n_members; i++) {
        const struct oo_member *member = &engine->members[members[i]];
        for (uint32_t j = 0; j < member->n_tensors && status == OO_OK; j++) {
            const struct oo_member_tensor *tensor = &member->tensors[j];
            if (tensor->coded_bytes)
                status = oo__parts_of_coded(engine, tensor, made);
            else
                oo__part_of_plain(engine, tensor, made);
        }
    }
    return status;
}

static enum oo_status oo__parts_make(const struct oo_engine *engine, const uint32_t *members,
                                     uint32_t n_members, struct oo_parts_made *made) {
    *made = (struct oo_parts_made){0};
    enum oo_status status = oo__parts_of(engine, members, n_members, made);
    if (status != OO_OK)
        return status;
    made->room = made->count;
    /* Not of nothing: oo__check_tensors refuses members without tensors, and tensors without bytes.
     */
    // NOLINTNEXTLINE(clang-analyzer-optin.portability.UnixAPI)
    made->parts = malloc(made->room * sizeof *made->parts);
    if (!made->parts)
        return oo__fail(OO_E_MEMORY, "no memory for the %u parts of a unit", made->room);
    status = oo__parts_of(engine, members, n_members, made);
    if (status != OO_OK) {
        free(made->parts);
        made->parts = NULL;
    }
    return status;
}

/* Note where memory keeps what travels of each part, once it was read from a file. */
static void oo__unit_note_kept(struct oo_engine *engine, struct oo_unit *unit) {
    int far = 0; /* what memory keeps is read once */
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        struct oo_part *part = &unit->parts[i];
        const struct oo_disk *disk = oo__disk_of(part);
        const size_t skipped = part->header.mode ? oo_codec_skipped(&part->header) : 0;
        part->kept = disk ? oo__kept_at(disk, part->host - skipped, skipped + part->bytes) : NULL;
        if (part->kept && skipped) /* it was read when the part was made, and never is again */
            oo__disk_keep_shown(disk, part->kept, part->host - skipped, skipped);
        far |= disk && !part->kept;
    }
    oo_plan_far(engine->plan, (uint32_t)(unit - engine->units), far);
}

static void oo__unit_take_parts(struct oo_engine *engine, struct oo_unit *unit,
                                const struct oo_parts_made *made) {
    free(unit->parts);
    unit->parts = made->parts;
    unit->n_parts = made->count;
    unit->host_bytes = 0;
    unit->is_fed = unit->on_disk = unit->is_coded = unit->decodes = 0;
    unit->only_decoded = 1;
    for (uint32_t i = 0; i < unit->n_parts; i++) {
        const struct oo_part *part = &unit->parts[i];
        unit->host_bytes += part->bytes;
        unit->is_fed |= !part->locked;
        unit->on_disk |= oo__disk_of(part) != NULL;
        unit->is_coded |= part->header.mode != 0;
        unit->decodes |= part->header.mode == OO_CODEC_TIERS;
        unit->only_decoded &= part->header.mode == OO_CODEC_TIERS;
        oo__label(engine, part->host, part->bytes, "masters of unit",
                  (uint32_t)(unit - engine->units));
    }
    oo__unit_note_kept(engine, unit);
}

static void oo__keep_nothing_in(struct oo_engine *engine, const struct oo_host *room) {
    /* H10: a copy thread may be reading what is kept there, or writing it. */
    oo__feeds_await(engine);
    for (const struct oo_known *known = engine->known; known; known = known->next)
        if (known->host->disk)
            oo__kept_forget(known->host->disk, room);
}

enum oo_status oo_engine_keep_in(struct oo_engine *engine, struct oo_host *room,
                                 const struct oo_keeping *kept, size_t count) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    oo__keep_nothing_in(engine, room);
    room->arrived = 0;
    for (size_t i = 0; i < count && status == OO_OK; i++) {
        const struct oo_known *known = oo__known_memory(engine, kept[i].masters, kept[i].bytes);
        status = known ? oo__kept_add(known->host, &kept[i], room)
                       : oo__fail(OO_E_ARGUMENT, "this engine does not know the %zu bytes at %p",
                                  kept[i].bytes, kept[i].masters);
    }
    if (status != OO_OK)
        oo__keep_nothing_in(engine, room);
    oo__kept_note(engine, room, oo__known_memory(engine, room->pages, room->bytes));
    for (uint32_t i = 0; i < engine->n_units; i++)
        if (engine->units[i].on_disk)
            oo__unit_note_kept(engine, &engine->units[i]);
    oo__leave(engine);
    return status;
}

int oo__may_fetch_ahead(const struct oo_engine *engine, const struct oo_unit *unit) {
    for (uint32_t i = 0; i < unit->n_parts; i++)
        if (!unit->parts[i].memory)
            return 0;
    return !unit->rewritten && !(unit->trainable && engine->held);
}

/* Give `unit` its members' tensors; members exist already. Nothing changes on failure. */
static enum oo_status oo__unit_create(struct oo_engine *engine, uint32_t model,
                                      const uint32_t *members, uint32_t n_members,
                                      size_t device_bytes, int trainable, uint32_t *id) {
    enum oo_status status;
    struct oo_parts_made made = {0};
    uint32_t *ids = NULL;
    OO_TRY(oo__parts_make(engine, members, n_members, &made));
    ids = malloc(n_members * sizeof *ids);
    if (!ids) {
        status = oo__fail(OO_E_MEMORY, "no memory for a unit of %u members", n_members);
        goto done;
    }
    void *units = engine->units;
    OO_TRY(
        oo__grow(engine, &units, &engine->unit_capacity, engine->n_units, sizeof *engine->units));
    engine->units = units;
    OO_TRY(
        oo__events_reserve(engine, OO_ORDERS, 2)); /* of its copy's arrival, and of its last use */
    OO_TRY(oo_plan_unit_add(engine->plan, device_bytes, id));
    struct oo_unit *unit = &engine->units[*id];
    engine->n_units = *id + 1;
    *unit = (struct oo_unit){.model = model, .n_members = n_members, .device_bytes = device_bytes};
    unit->trainable = trainable != 0;
    unit->members = ids;
    memcpy(ids, members, n_members * sizeof *ids);
    oo__unit_take_parts(engine, unit, &made);
    for (uint32_t i = 0; i < n_members; i++)
        engine->members[members[i]].unit = *id;
    oo_plan_allow(engine->plan, *id, oo__may_fetch_ahead(engine, unit));
    return OO_OK;
done:
    free(made.parts);
    free(ids);
    return status;
}

/* Set a member's tensors from `offset` on; returns the offset after them. */
static size_t oo__member_lay_out(struct oo_member_tensor *to, const struct oo_tensor *from,
                                 uint32_t count, size_t offset, size_t *offsets) {
    for (uint32_t i = 0; i < count; i++) {
        to[i] = (struct oo_member_tensor){.host = from[i].host,
                                          .bytes = from[i].bytes,
                                          .offset = offset,
                                          .coded_bytes = from[i].coded_bytes,
                                          .coded_kind = from[i].coded_kind};
        offsets[i] = offset;
        offset += oo__align(from[i].bytes);
    }
    return offset;
}

/* Its chunks are looked at when parts are made of them. */
static enum oo_status oo__check_coded(const struct oo_tensor *tensor, uint32_t i, int trainable) {
    if (tensor->coded_kind < OO_CODEC_BF16 || tensor->coded_kind > OO_CODEC_INT8 ||
        tensor->bytes % oo_codec_weight_bytes(tensor->coded_kind) ||
        tensor->coded_bytes > UINTPTR_MAX / 4 - (uintptr_t)tensor->host / 4)
        return oo__fail(OO_E_ARGUMENT, "tensor %u of a member: %zu coded bytes of kind %d for %zu",
                        i, tensor->coded_bytes, (int)tensor->coded_kind, tensor->bytes);
    if (trainable)
        return oo__fail(OO_E_ARGUMENT,
                        "tensor %u of a trainable unit is coded: an optimizer "
                        "cannot rewrite it; give its weights as they are",
                        i);
    return OO_OK;
}

/* `offset`: what comes before them in the unit. */
static enum oo_status oo__check_tensors(const struct oo_tensor *tensors, uint32_t count,
                                        size_t offset, int trainable) {
    enum oo_status status = OO_OK;
    if (count == 0)
        return oo__fail(OO_E_ARGUMENT, "a member needs at least one tensor");
    for (uint32_t i = 0; i < count; i++) {
        if (!tensors[i].host || tensors[i].bytes == 0 ||
            tensors[i].bytes > UINTPTR_MAX - (uintptr_t)tensors[i].host)
            return oo__fail(OO_E_ARGUMENT, "tensor %u of a member has address %p and %zu bytes", i,
                            tensors[i].host, tensors[i].bytes);
        if (tensors[i].coded_bytes)
            OO_TRY(oo__check_coded(&tensors[i], i, trainable));
        if (tensors[i].bytes > SIZE_MAX / 4 || offset > SIZE_MAX / 4)
            return oo__fail(OO_E_ARGUMENT,
                            "tensor %u of %zu bytes after %zu: no memory is so large", i,
                            tensors[i].bytes, offset);
        offset += oo__align(tensors[i].bytes);
    }
done:
    return status;
}

enum oo_status oo_unit_add(struct oo_engine *engine, uint32_t model,
                           const struct oo_tensor *tensors, const uint32_t *n_tensors,
                           uint32_t n_members, int trainable, uint32_t *unit, uint32_t *members,
                           size_t *offsets) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    const uint32_t first = engine->n_members;
    OO_TRY(oo__need_model(engine, model));
    if (n_members == 0) {
        status = oo__fail(OO_E_ARGUMENT, "a unit needs at least one member");
        goto done;
    }
    size_t offset = 0;
    for (uint32_t i = 0; i < n_members; i++) {
        OO_TRY(oo__check_tensors(tensors, n_tensors[i], offset, trainable));
        void *all = engine->members;
        OO_TRY(oo__grow(engine, &all, &engine->member_capacity, engine->n_members,
                        sizeof *engine->members));
        engine->members = all;
        struct oo_member *member = &engine->members[engine->n_members];
        /* In the second round the analyzer forgets that oo__grow made room. */
        // NOLINTNEXTLINE(clang-analyzer-security.ArrayBound)
        *member = (struct oo_member){.n_tensors = n_tensors[i], .task = -1};
        member->tensors = malloc(n_tensors[i] * sizeof *member->tensors);
        if (!member->tensors) {
            status = oo__fail(OO_E_MEMORY, "no memory for a member of %u tensors", n_tensors[i]);
            goto done;
        }
        members[i] = engine->n_members++;
        offset = oo__member_lay_out(member->tensors, tensors, n_tensors[i], offset, offsets);
        tensors += n_tensors[i];
        offsets += n_tensors[i];
    }
    OO_TRY(oo__unit_create(engine, model, members, n_members, offset, trainable, unit));
done:
    if (status != OO_OK)
        while (engine->n_members > first)
            free(engine->members[--engine->n_members].tensors);
    oo__leave(engine);
    return status;
}

/* A unit goes with its last member. What a member leaves behind no longer travels with the others;
 * on the device its place stays. */
static void oo__unit_left(struct oo_engine *engine, uint32_t id) {
    struct oo_unit *unit = &engine->units[id];
    struct oo_parts_made made;
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < unit->n_members; i++)
        if (engine->members[unit->members[i]].unit == id)
            unit->members[n_left++] = unit->members[i];
    unit->n_members = n_left;
    if (!n_left)
        oo__unit_remove(engine, id);
    else if (oo__parts_make(engine, unit->members, n_left, &made) == OO_OK) {
        oo__unit_take_parts(engine, unit, &made);
        oo_plan_allow(engine->plan, id, oo__may_fetch_ahead(engine, unit));
    } /* else all of it travels, as before: there is no memory to write down what stays */
}

enum oo_status oo_member_remove(struct oo_engine *engine, uint32_t id) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (id >= engine->n_members || engine->members[id].removed) {
        status = oo__fail(OO_E_ARGUMENT, "member %u does not exist", id);
        goto done;
    }
    struct oo_member *member = &engine->members[id];
    const uint32_t unit = member->unit;
    if (oo_plan_pins(engine->plan, unit)) {
        status = oo__fail(OO_E_STATE, "member %u is removed while a call computes with it", id);
        goto done;
    }
    OO_TRY(oo__drop(engine, unit));
    free(member->tensors);
    member->tensors = NULL;
    member->removed = 1;
    member->unit = OO_NO_UNIT;
    oo__unit_left(engine, unit);
done:
    oo__leave(engine);
    return status;
}

enum oo_status oo_member_move(struct oo_engine *engine, uint32_t id,
                              const struct oo_tensor *tensors, uint32_t n_tensors,
                              uint32_t *unit_id, size_t *offsets) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    struct oo_member_tensor *laid_out = NULL;
    if (id >= engine->n_members || engine->members[id].removed) {
        status = oo__fail(OO_E_ARGUMENT, "member %u does not exist", id);
        goto done;
    }
    struct oo_member *member = &engine->members[id];
    const uint32_t old_id = member->unit;
    OO_TRY(oo__check_tensors(tensors, n_tensors, 0, engine->units[old_id].trainable));
    if (oo_plan_pins(engine->plan, old_id)) {
        status =
            oo__fail(OO_E_STATE, "the weights were replaced while another call computes with them");
        goto done;
    }
    laid_out = malloc(n_tensors * sizeof *laid_out);
    if (!laid_out) {
        status = oo__fail(OO_E_MEMORY, "no memory for a member of %u tensors", n_tensors);
        goto done;
    }
    const size_t device_bytes = oo__member_lay_out(laid_out, tensors, n_tensors, 0, offsets);
    OO_TRY(oo__drop(engine, old_id));
    struct oo_unit *old = &engine->units[old_id];
    struct oo_member_tensor *replaced = member->tensors;
    const uint32_t n_replaced = member->n_tensors;
    member->tensors = laid_out;
    member->n_tensors = n_tensors;
    const int stays =
        old->n_members == 1 && old->device_bytes == device_bytes && n_replaced == n_tensors;
    struct oo_parts_made made;
    status =
        stays ? oo__parts_make(engine, &id, 1, &made)
              : oo__unit_create(engine, old->model, &id, 1, device_bytes, old->trainable, unit_id);
    if (status != OO_OK) {
        member->tensors = replaced;
        member->n_tensors = n_replaced;
        goto done;
    }
    if (stays) {
        /* Alone already, and of the same size: weights swapped to and fro (EMA) stay one unit. */
        oo__unit_take_parts(engine, old, &made);
        oo_plan_allow(engine->plan, old_id, oo__may_fetch_ahead(engine, old));
        *unit_id = old_id;
    } else {
        oo__unit_left(engine, old_id);
    }
    member->stamp_known = 0;
    member->glance = 0;
    member->sweep = 0;
    laid_out = NULL;
    free(replaced);
done:
    free(laid_out);
    oo__leave(engine);
    return status;
}

static int oo__has_codes(const struct oo_engine *engine, uint32_t id) {
    const struct oo_unit *unit = &engine->units[id];
    for (uint32_t i = 0; i < unit->n_members; i++) {
        const struct oo_member *member = &engine->members[unit->members[i]];
        for (uint32_t j = 0; j < member->n_tensors; j++)
            if (member->tensors[j].coded_bytes)
                return 1;
    }
    return 0;
}

enum oo_status oo_unit_set_trainable(struct oo_engine *engine, uint32_t id, int trainable) {
    enum oo_status status = oo__enter(engine, 0);
    if (status != OO_OK)
        return status;
    if (id >= engine->n_units || engine->units[id].removed) {
        status = oo__fail(OO_E_ARGUMENT, "unit %u does not exist", id);
        goto done;
    }
    struct oo_unit *unit = &engine->units[id];
    if (trainable && oo__has_codes(engine, id)) {
        status = oo__fail(OO_E_ARGUMENT,
                          "unit %u has coded weights, which an optimizer cannot "
                          "rewrite: give them as they are (oo_member_move) first",
                          id);
        goto done;
    }
    unit->trainable = trainable != 0;
    oo_plan_allow(engine->plan, id, oo__may_fetch_ahead(engine, unit));
done:
    oo__leave(engine);
    return status;
}

void oo__free_models(struct oo_engine *engine) {
    for (uint32_t i = 0; i < engine->n_units; i++) {
        free(engine->units[i].parts);
        free(engine->units[i].members);
        free(engine->units[i].feed);
    }
    for (uint32_t i = 0; i < engine->n_members; i++)
        free(engine->members[i].tensors);
    free(engine->units);
    free(engine->members);
    free(engine->models);
}
