/* simulated.h - what is passed to the simulated driver alone, for its race detector, its clock and
 * its reports. On a real driver all of it succeeds and does nothing. */
#ifndef OO_SIMULATED_H
#define OO_SIMULATED_H

#include "call.h"

/* Name bytes or a stream in the simulator's reports: "unit 12", "h2d". `unit` may be OO_NO_UNIT. */
void oo__label(struct oo_engine *engine, const void *memory, size_t bytes, const char *what,
               uint32_t unit);
void oo__label_stream(struct oo_engine *engine, OOCUstream stream, const char *name);
/* The host reads or writes these bytes now; a copy thread says so by the first of the two. */
OOCUresult oo__declare_access(const struct oo_engine *engine, const void *memory, size_t bytes,
                              int is_write);
enum oo_status oo__host_access(struct oo_engine *engine, const void *memory, size_t bytes,
                               int is_write);
/* A copy thread reads so many bytes of a file, which takes virtual time where the simulated device
 * has a disk. `*wanted`: 0 where the bytes need not be there, as copies move none. */
OOCUresult oo__simulated_read(const struct oo_engine *engine, size_t bytes, int *wanted);
/* A copy thread waits for the event in virtual time, of which there is none where this returns
 * OOCU_ERROR_NOT_SUPPORTED. */
OOCUresult oo__simulated_await(const struct oo_engine *engine, const struct oo_event *event);
/* Whether `expected` copy threads, no matter how soon, wait in virtual time: 1, 0, or -1 where
 * there is none. */
int oo__simulated_readers(const struct oo_engine *engine, unsigned expected);
/* All of them do: let time pass until one goes on. */
void oo__simulated_pass(const struct oo_engine *engine);
/* The host's clock, in seconds since no matter when: on the simulated driver its virtual one. */
double oo__host_clock_s(const struct oo_engine *engine);
/* Whether the simulated driver collects work before it hands it over; 0 if there is none to ask. */
int oo__simulates_submission(struct oo_engine *engine, int *late);
/* The next copy from or to this memory is of pageable bytes on purpose. */
void oo__expect_pageable(struct oo_engine *engine, const void *memory);
/* To the simulated device torch's memory is device memory between these two. `flags`:
 * OOSIM_ADOPT_KEEP or OOSIM_ADOPT_POISON. */
enum oo_status oo__adopt(struct oo_engine *engine, uintptr_t address, size_t bytes,
                         unsigned int flags, OOCUstream stream);
OOCUresult oo__disown(struct oo_engine *engine, uintptr_t address);
/* Whether kernels are declared instead of run. */
int oo__declares_kernels(const struct oo_engine *engine);
/* A kernel of `seconds` on `stream` that reads and writes these bytes, or none (NULL). */
enum oo_status oo__declare_kernel(struct oo_engine *engine, OOCUstream stream,
                                  const OOSimRange *read, const OOSimRange *written,
                                  double seconds);
/* The kernel that reads a member which is acquired. */
enum oo_status oo__launch(struct oo_engine *engine, const struct oo_member *member,
                          OOCUstream stream, double seconds);

#endif
