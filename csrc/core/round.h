/* round.h - units that are used in turn, over and over, as in sampling: which stay in the arena,
 * and how much of it the others stream through. Pure: numbers in, numbers out. */
#ifndef OO_ROUND_H
#define OO_ROUND_H

#include <stddef.h>
#include <stdint.h>

/* One unit of a round. */
struct oo_turn {
    uint32_t unit;
    int kept, stays;
    size_t bytes;
    double seconds; /* from its begin to the next one's, without waits for copies */
    double far;     /* 0: it is in memory; else on a disk, and a byte takes so many times as long */
    /* Scratch: */
    double arrives, share;
    size_t taken;
    int must; /* 1: stay; -1: stream */
};

/* Decide which units stay in `room`: turns are in order of use, and those that stay are spread
 * evenly over their bytes, so that the link has as much to do at any time; or over the seconds,
 * where such rounds are `alone`: what training finds in the arena afterwards shall suit a backward,
 * too. What they leave is a ring for the others. The larger it is, the earlier a copy can begin,
 * and the more bytes are copied: the seconds show what is enough. They also show whether the
 * largest units can all stay, so that the ring need not hold one. With a `link_bps` of 0 they are
 * not known. Returns the bytes that stay. Those that are `kept` do, whatever else is decided. What
 * is on a disk is read least if it goes first: no other stays while any of it streams. */
size_t oo_round_settle(struct oo_turn *turns, size_t count, size_t room, double link_bps,
                       int alone);

/* A round may take so long instead of the least if that saves bytes. With 1.0 time is 1.015 and
 * bytes 1.018; with 1.02 they are 1.021 and 1.015. */
static inline double oo_round_nearly(double least) { return least * 1.005; }

/* The one of those that stream which is where the ring begins, in every round: else how much is
 * left over at the end of the ring would depend on how it all began. It is the largest, of several
 * the one that was created first, whichever turn comes first here; or the first turn where no
 * seconds are known to judge by. `count`: none, as all of them are of one size, and nothing is left
 * over. */
size_t oo_round_first(const struct oo_turn *turns, size_t count);

/* Seconds that link and disk, side by side, have to bring what streams. */
double oo_round_copies_s(const struct oo_turn *turns, size_t count, double link_bps);

/* Seconds of a round where those stay that are marked, and the others stream through `ring` bytes;
 * DBL_MAX where these do not hold them. */
double oo_round_seconds(struct oo_turn *turns, size_t count, size_t ring, double link_bps);

#endif
