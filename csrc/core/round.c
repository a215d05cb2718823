/* round.c - who stays, and who streams; see round.h. */
#include "round.h"

#include <float.h>

enum {
    OO_SLOTS = 4,       /* of the largest unit's size: a ring where no seconds are known */
    OO_MOST_SLOTS = 12, /* that are tried */
    OO_LAPS = 3         /* after so many a round takes as long as the one before it */
};
/* Bytes are worth so much time. */
static const double oo__nearly = 1.005;

static size_t oo__spread(struct oo_turn *turns, size_t count, size_t total, size_t room) {
    double owed = 0;
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
        const double bytes = (double)turns[i].bytes;
        owed += bytes * (double)room / (double)total;
        turns[i].stays = owed >= bytes / 2 && turns[i].bytes <= room - held;
        if (turns[i].stays) {
            owed -= bytes;
            held += turns[i].bytes;
        }
    }
    return held;
}

/* Where the next unit lies in the ring: after the one before it, or from the begin; and what it
 * takes, with what is left over at the end. 0: that is still in use. */
static int oo__take(struct oo_turn *turn, size_t ring, size_t used, size_t *position) {
    const size_t skipped = turn->bytes > ring - *position ? ring - *position : 0;
    turn->taken = turn->bytes + skipped;
    if (turn->taken > ring - used)
        return 0;
    *position = (skipped ? 0 : *position) + turn->bytes;
    return 1;
}

/* A copy begins when the one before it has ended and what lay in its place has been used. */
double oo_round_seconds(struct oo_turn *turns, size_t count, size_t ring, double link_bps) {
    double computed = 0, copied = 0, begin = 0;
    size_t used = 0, position = 0;
    for (size_t now = 0, ahead = 0; now < OO_LAPS * count; now++) {
        struct oo_turn *turn = &turns[now % count];
        if (now % count == 0)
            begin = computed;
        for (; ahead < now + count; ahead++) {
            struct oo_turn *next = &turns[ahead % count];
            if (next->stays)
                continue;
            if (!oo__take(next, ring, used, &position))
                break;
            used += next->taken;
            copied = (copied > computed ? copied : computed) + (double)next->bytes / link_bps;
            next->arrives = copied;
        }
        if (ahead == now)
            return DBL_MAX; /* the ring does not hold it */
        if (!turn->stays) {
            computed = computed > turn->arrives ? computed : turn->arrives;
            used -= turn->taken;
        }
        computed += turn->seconds;
    }
    return computed - begin;
}

/* The smallest ring that costs hardly any time, in slots. */
static size_t oo__enough(struct oo_turn *turns, size_t count, size_t total, size_t room,
                         size_t slot, double link_bps) {
    double seconds[OO_MOST_SLOTS + 1], least = DBL_MAX;
    for (size_t slots = 1; slots <= OO_MOST_SLOTS; slots++) {
        seconds[slots] = DBL_MAX;
        if (slots * slot > room)
            continue;
        const size_t held = oo__spread(turns, count, total, room - slots * slot);
        seconds[slots] = oo_round_seconds(turns, count, room - held, link_bps);
        least = seconds[slots] < least ? seconds[slots] : least;
    }
    size_t slots = 1;
    while (seconds[slots] > least * oo__nearly) /* one of them is the least */
        slots++;
    return slots;
}

size_t oo_round_settle(struct oo_turn *turns, size_t count, size_t room, double link_bps) {
    size_t total = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        total += turns[i].bytes;
        largest = turns[i].bytes > largest ? turns[i].bytes : largest;
    }
    if (total <= room)
        return oo__spread(turns, count, total, total);
    const size_t slots =
        link_bps > 0 ? oo__enough(turns, count, total, room, largest, link_bps) : OO_SLOTS;
    const size_t ring = slots * largest < room ? slots * largest : room;
    return oo__spread(turns, count, total, room - ring);
}
