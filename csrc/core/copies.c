/* copies.c - which copies still read masters directly.
 *
 * Code that rewrites masters waits for the copies that read them. As a rule that costs no call of
 * the driver: a gradient that has arrived came after kernels that came after the copies. */
#include "copies.h"
#include "call.h"
#include "timing.h"

void oo__note_copy(struct oo_engine *engine, struct oo_unit *unit) {
    unit->copy = ++engine->copies.queued;
}

void oo__note_awaited(struct oo_engine *engine, const struct oo_unit *unit, OOCUstream stream) {
    struct oo_copies *copies = &engine->copies;
    if (unit->is_fed) /* copies that are queued behind its own may have lower numbers */
        return;
    if (copies->stream != stream)
        copies->awaited = 0;
    copies->stream = stream;
    if (unit->copy > copies->awaited)
        copies->awaited = unit->copy;
}

uint64_t oo__awaited_by(const struct oo_engine *engine, OOCUstream stream) {
    return engine->copies.stream == stream ? engine->copies.awaited : 0;
}

void oo__note_ended(struct oo_engine *engine, uint64_t copy) {
    if (copy > engine->copies.ended)
        engine->copies.ended = copy;
}

void oo__queue_look(struct oo_engine *engine) {
    struct oo_copies *copies = &engine->copies;
    const uint32_t half = OO_QUEUED_PARTS / 2;
    if (oo__queue_has_room(engine, half))
        return;
    if (copies->unlooked) {
        copies->unlooked--;
        return;
    }
    oo__spans_harvest(engine);
    if (!oo__queue_has_room(engine, half) && engine->spans.head == engine->spans.tail) {
        const OOCUresult result = engine->driver.cuStreamQuery(engine->h2d);
        if (result == OOCU_SUCCESS)
            copies->left = copies->sent;
        else if (result != OOCU_ERROR_NOT_READY)
            (void)oo__note(engine, "cuStreamQuery", result);
    }
    if (!oo__queue_has_room(engine, half)) /* the host is far ahead, and will be for a while */
        copies->unlooked = OO_USES_UNLOOKED;
}

enum oo_status oo__await_copies(struct oo_engine *engine, uint64_t copy) {
    if (copy <= engine->copies.ended)
        return OO_OK;
    /* H7: the host rewrites these masters next. */
    enum oo_status status = oo__synchronize(engine, engine->h2d, 0);
    if (status == OO_OK)
        oo__note_ended(engine, engine->copies.queued);
    return status;
}
