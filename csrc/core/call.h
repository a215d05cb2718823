/* call.h - the frame of every call: enter, leave, and what becomes of a driver call's result. */
#ifndef OO_CALL_H
#define OO_CALL_H

#include "state.h"

/* Begin and end a call: mutex, pid, context. `enter` fails with nothing to undo. A call that has
 * work to do on a dead engine, or without a context, passes one of the first two flags, and looks
 * at engine->usable before it calls the driver. A call that never calls the driver passes the
 * third. One that queues copies passes the fourth: with OO_NONBLOCKING it does not begin where the
 * driver's queue may be full. */
enum {
    OO__EVEN_DEAD = 256,
    OO__EVEN_WITHOUT_CONTEXT = 512,
    OO__WITHOUT_DRIVER = 1024,
    OO__QUEUES = 2048,
    OO__PACED = 4096 /* no call's: it may wait for the device */
};
enum oo_status oo__enter(struct oo_engine *engine, int flags);
void oo__leave(struct oo_engine *engine);
/* Give the mutex up until another call ends a use, or the clock shows `until_s`; may return for no
 * reason. The context is left: oo__leave, and begin the call again. */
void oo__wait_for_a_release(struct oo_engine *engine, double until_s);
/* Status of a driver call; a sticky result kills the engine. */
enum oo_status oo__check(struct oo_engine *engine, const char *call, OOCUresult result);
/* The same where the failure does not fail the caller; the thread's error stays. */
enum oo_status oo__note(struct oo_engine *engine, const char *call, OOCUresult result);
/* The same for a call that gives something back, which must not be tried again: it is counted as
 * leaked. */
void oo__note_leak(struct oo_engine *engine, const char *call, OOCUresult result);
#define OO_GIVE_BACK(engine, call, ...)                                                            \
    oo__note_leak(engine, #call, (engine)->driver.call(__VA_ARGS__))
#define OO_DRIVE(engine, call, ...) oo__check(engine, #call, (engine)->driver.call(__VA_ARGS__))
/* The error of every call after the context was lost. */
enum oo_status oo__fail_dead(const struct oo_engine *engine);
/* OO_E_CAPTURE where the caller's stream is capturing; asked before anything is queued on it. */
enum oo_status oo__refuse_capture(struct oo_engine *engine, OOCUstream stream);
/* Wait on the host until the stream has ended; counted. */
enum oo_status oo__synchronize(struct oo_engine *engine, OOCUstream stream, int recovering);

/* Where the driver collects work first: hand the queued copies to the device now. Not a wait. */
void oo__flush(struct oo_engine *engine);
/* Likewise those towards the host. */
void oo__flush_home(struct oo_engine *engine);

#endif
