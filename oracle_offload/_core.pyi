"""Types of the C extension; csrc/python/ implements it, csrc/include/oracle_offload.h explains it.

Pointers, streams and devices travel as integers, so that one build serves every torch. A stream is
the ``CUstream`` handle (``torch.cuda.Stream.cuda_stream``; 0 is the default stream). Failed calls
raise `oracle_offload.errors.OffloadError` or its subclasses, `NoRoomError` where the arena has no
room; running out of host memory raises `MemoryError`. An integer that its argument cannot be raises
`ValueError` with the value, what is no integer `TypeError`.
"""

from collections.abc import Callable
from typing import Final, Generic, Self, TypedDict, TypeVar, final, type_check_only

FORWARD: Final = 0  # a forward outside any graph task
RECOMPUTE: Final = 1  # a forward inside a graph task: a checkpoint recomputes
RECORDED: Final = 3  # a forward outside any graph task, under grad mode: of training, not a sample
BACKWARD: Final = 2
ALIGNMENT: Final = 256  # bytes; of every tensor in host and device memory
STAGING_BYTES: Final = 33554432  # device memory that any coded tensor can pass through
# What coded weights are: two bytes each, or one with the sign first, or one in two's complement.
BF16: Final = 1
FP8: Final = 2
INT8: Final = 3

VERSION: Final[str]  # of the engine, as oracle_offload.__version__
BUILD: Final[str]  # compiler, flags and date of this extension

_T = TypeVar("_T")
_Tensor = TypeVar("_Tensor", bound=tuple[int, int] | tuple[int, int, int, int])

@type_check_only
class Stats(TypedDict):
    """Counters since the engine (or model) began; see struct oo_stats."""

    managed_bytes: int  # device bytes of all units
    locked_bytes: int  # host bytes that are page-locked
    pageable_bytes: int  # host bytes of units that could not be locked
    disk_bytes: int  # of masters that are in files
    disk_kept_bytes: int  # of masters in files that are kept in memory, once read
    disk_arrived_bytes: int  # of those, what has been
    ring_bytes: int  # page-locked bytes of the rings that those pass through
    arena_bytes: int  # capacity: bytes of all segments
    staging_bytes: int  # device bytes that coded weights pass through
    resident_bytes: int  # device bytes of the units in the arena now
    peak_resident_bytes: int
    largest_unit_bytes: int
    learned_block_bytes: int  # largest checkpointed block seen so far
    h2d_bytes: int
    h2d_copies: int
    h2d_seconds: float  # of the copies measured
    h2d_timed_bytes: int  # bytes of the copies measured
    disk_read_bytes: int  # of h2d_bytes, those that were read from files
    disk_read_seconds: float  # that those reads took, added up over copy threads
    unlocked_h2d_bytes: int  # of masters that are not page-locked
    unlocked_h2d_seconds: float  # in which copy threads were at them, by the host's clock
    decodes: int  # chunks of coded masters that a kernel has decoded
    decoded_bytes: int  # what that made of them; h2d_bytes has them coded
    decode_seconds: float  # of the decodes measured
    decode_timed_bytes: int  # what those made
    d2h_bytes: int
    d2h_copies: int
    d2h_seconds: float
    d2h_timed_bytes: int
    left_bytes: int
    left_copies: int
    returned_bytes: int
    returned_copies: int
    brought_bytes: int
    brought_copies: int
    acquires: int
    hits: int
    late: int  # acquires that had to enqueue their own copy
    stale: int  # hits refused because the master had changed
    prefetches: int
    prefetch_failures: int  # given up without harm: the unit is copied when it is asked for
    lost_uses: int  # their end could not be marked: who overwrites the unit waits for them
    evictions: int
    waits: int  # of the compute stream that uses a copy first, for it
    timed_waits: int  # those of them that were measured: one in 16, all under a timeline
    stalls: int  # of timed_waits, longer than 10 microseconds
    stall_seconds: float  # of those stalls
    lock_refusals: int  # the driver gave no page-locked memory
    host_waits: int  # of callers, for the device
    feed_waits: int  # of callers, for copy threads
    feed_wait_seconds: float  # that those took, by the host's clock
    stopped_feeds: int  # copies that copy threads gave up, as their unit had to go
    copy_waits: int  # of copy threads, for the device
    recoveries: int  # synchronisations made only because a driver call had failed
    allocations: int  # driver objects and host blocks created; flat in the steady state
    units: int
    resident_units: int

@type_check_only
class TraceRow(TypedDict):
    kind: str  # "compute", "h2d", "d2h", "stall" or "decode"
    unit: int
    start_s: float  # seconds since trace_start
    end_s: float
    bytes: int

@final
class HostBuffer:
    """`nbytes` of page-aligned host memory; exports a writable buffer.

    Tensors made with ``torch.frombuffer`` keep the object alive; the last reference frees it.
    Not inherited by forked children while locked.
    """

    def __new__(
        cls, nbytes: int, node: int = -1, file: int = -1, begin: int = 0, path: bytes = b""
    ) -> Self:
        """`node`: the NUMA node that its pages shall be on, as far as threads may run there.

        `file`: a descriptor, or what `section_create` has made, whose bytes from `begin` on it is:
        in all processes the same memory. With its `path` it is all of that file instead (on Windows
        `file` is a handle), privately mapped: what an engine copies of it, it reads from the file,
        unless it was written here.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def arrived(self) -> int:
        """Bytes of files that were read into it: see `Engine.keep_in`."""

    @property
    def known(self) -> bool: ...
    @property
    def locked(self) -> bool: ...
    def check(self, offset: int, nbytes: int, /) -> None:
        """Refuse bytes of a file that was written since, unless this process has written them."""

    def protect(self, writable: object, /) -> None:
        """Let this process write the memory, or read it alone: lock it before that."""

    def fill(self, offset: int, source: int, nbytes: int, /) -> None:
        """Copy `nbytes` from address `source` to `offset`, with several threads, GIL released."""

@final
class Use:
    """A use of a unit; see `Engine.use`."""

    def __enter__(self, /) -> int:
        """Return the device address of the unit."""

    def __exit__(self, /, *details: object) -> None:
        """The work that uses the unit has been queued."""

@final
class Taken(Generic[_T]):
    """Calls `take` at the begin of a ``with`` block, and `give` at its end, whatever happens.

    Where both are functions of C, no interrupt comes between the two, or splits either. A `give`
    that one cuts short is called again. Where `take` returns False nothing was taken. No variable
    may hold such an object: an interrupt on the way to the block ends it because it is let go.
    """

    def __new__(cls, take: Callable[[], _T], give: Callable[[], object]) -> Taken[_T]: ...
    def __enter__(self, /) -> _T:
        """Return what `take` returns."""

    def __exit__(self, /, *details: object) -> None:
        """Call `give`."""

@final
class Engine:
    """The engine of one device. `library` None: the system's CUDA driver."""

    def __new__(cls, library: str | None, device: int) -> Self: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def device_name(self) -> str: ...
    @property
    def pci_id(self) -> str: ...
    @property
    def numa_node(self) -> int:
        """NUMA node that is nearest to the device; -1 where the system does not say."""

    @property
    def driver_version(self) -> int: ...
    @property
    def compute_stream(self) -> int:
        """A stream for callers that have none (the simulated device's); created on first use."""

    @property
    def learned_block_bytes(self) -> int:
        """That of `stats`, without the others."""

    def close(self) -> str | None:
        """Give back everything. `OffloadError` while models are attached.

        Returns what the driver refused to take back (it is lost then), None where that is nothing.
        """

    def make_current(self) -> None:
        """Leave the device's context current on this thread, where no runtime does that."""

    def mem_info(self) -> tuple[int, int]:
        """(free, total) device bytes."""

    def lock(self, buffer: HostBuffer, nbytes: int = 9223372036854775807, /) -> str | None:
        """Make `buffer` known, and page-lock its first `nbytes`, in whole pages.

        Returns why the system refused to lock them, None where it did not. Units of memory that is
        not locked go through a small locked ring.
        """

    def lockable(self, buffer: HostBuffer, /) -> int:
        """How many more bytes the system would page-lock now, but no more than `buffer` has.

        Tried out with the buffer's own pages, which must not be locked; up to 256 KiB too low.
        """

    def reserve_rings(self, nbytes: int, /) -> str | None:
        """Have two rings of about `nbytes` of page-locked memory, for what cannot be locked.

        Returns why the system refused, None where it did not; then they are as they were. 0 gives
        them back, unless memory that is not locked needs them.
        """

    def keep_in(self, buffer: HostBuffer, kept: list[tuple[int, int, int]], /) -> None:
        """Keep bytes of files in `buffer` once read, in place of what was kept there.

        `kept`: of each the address where the memory of a file shows it, its bytes, and its place in
        `buffer`, which must stay until it keeps nothing or the engine knows the files no more. No
        other engine may know them.
        """

    def unlock(self, buffer: HostBuffer, /) -> None:
        """Wait for copies from or to `buffer`, then make it ordinary memory again."""

    def add_model(self) -> int: ...
    def remove_model(self, model: int, /) -> None:
        """Forget the model's units, once every copy has ended (a host wait).

        `OffloadError` while one of its units is acquired.
        """

    def add_lease(self) -> int: ...
    def remove_lease(self, lease: int, /) -> None:
        """Take the lease's segments out of the arena, once every copy has ended (a host wait).

        The streams that the segments were allocated on wait for all uses of them. `OffloadError`
        while a unit in them is acquired.
        """

    def add_segment(self, lease: int, address: int, nbytes: int, stream: int, /) -> None:
        """Give `nbytes` of device memory to the arena; `stream` is the one it was allocated on."""

    def add_staging(self, lease: int, address: int, nbytes: int, stream: int, /) -> None:
        """Lend device memory that coded weights pass through, until the lease is removed.

        `STAGING_BYTES` have room for any coded tensor. `OffloadError` where this build has no
        kernels that decode.
        """

    def add_unit(
        self, model: int, members: list[list[_Tensor]], trainable: bool, /
    ) -> tuple[int, list[tuple[int, list[int]]]]:
        """One unit of several members (layers), each a list of (host address, nbytes).

        A coded tensor is (host address, nbytes on the device, coded nbytes, kind): 1 bf16, 2 fp8,
        3 int8. It needs `add_staging`, and cannot be trainable.
        Returns (unit, [(member, [device offset of each tensor in the unit])]).
        """

    def set_trainable(self, unit: int, trainable: bool, /) -> None:
        """Whether an optimizer may rewrite the unit's masters (see `hold`)."""

    def move_member(self, member: int, tensors: list[_Tensor], /) -> tuple[int, list[int]]:
        """The member's tensors now live elsewhere (or have another size).

        It gets a unit of its own. Memory outside every `HostBuffer` known to the engine is copied
        only on demand, at an acquire of this member. Returns (unit, [device offsets]).
        """

    def remove_member(self, member: int, /) -> None:
        """The member is managed no more; its memory is in use until its unit's others left too."""

    def acquire(
        self, member: int, stream: int, stamp: int, kind: int, task: int, seconds: float, /
    ) -> tuple[int, int, tuple[int, ...] | None]:
        """Make the member's unit ready for work queued on `stream` after this call.

        `stamp` is any integer that changes when a master is rewritten (``_version``); `kind` is
        FORWARD, RECORDED, RECOMPUTE or BACKWARD; `task` the id of the running graph task or -1;
        `seconds` how long a simulated device computes with the unit (a real one is not asked). The
        simulated copy arrives before this returns, so nothing can read the address too early.
        Returns (ticket, device address of the unit, units whose copy was enqueued or None); the
        caller must `stamp` the members of those units at once.
        """

    def use(
        self,
        member: int,
        stream: int,
        stamp: int,
        kind: int,
        task: int,
        seconds: float,
        stamp_units: Callable[[tuple[int, ...]], object],
        /,
    ) -> Use:
        """Begin a use as `acquire` does, for a ``with`` block, at whose end it is released.

        An interrupt between any two instructions leaves nothing acquired, as long as no variable
        holds what this returns. `stamp_units` is called with the units whose copies are enqueued.
        """

    def keep(
        self,
        member: int,
        stream: int,
        offset: int,
        nbytes: int,
        device_type: int,
        device_index: int,
        /,
    ) -> object:
        """Begin another use of a member that this thread has acquired, one that lasts.

        Returns a DLPack capsule of `nbytes` bytes, from `offset` of the unit, on the device that
        DLPack knows by `device_type` and `device_index`. The use ends, on `stream`, when the last
        alias of the tensor that is made of it is gone, on whatever thread that is.
        """

    def map(
        self,
        member: int,
        stream: int,
        nbytes: int,
        device_type: int,
        device_index: int,
        seconds: float,
        /,
    ) -> object | None:
        """Begin a use of a member's masters in host memory, by work that `stream` gets next.

        Returns a DLPack capsule of `nbytes` bytes from the first tensor on, on the device that
        DLPack knows by `device_type` and `device_index`; None where they are not all page-locked.
        The use ends as that of `keep` does. Nothing is copied: kernels read over the link.
        """

    def rewrite(self, unit: int, stream: int, stamps: list[tuple[int, int]], /) -> int:
        """The device writes to the unit's masters from now on, until `rewritten`.

        Where its copy is what they are, by a stamp of each member, what `stream` gets next may
        write to that, too, at the address that is returned. 0: there is none.
        """

    def written(self, unit: int, stream: int, /) -> None:
        """What writes to the unit's copy is queued on `stream`, and what brings it home joined.

        Others may take its place from then on.
        """

    def rewritten(self, unit: int, stream: int, stamps: list[tuple[int, int]], /) -> None:
        """The masters are written, and have arrived; so is the copy, with a stamp of each member.

        With fewer stamps the copy is not trusted. What `stream` got wrote to it.
        """

    def stamp(self, stamps: list[tuple[int, int]], /) -> None:
        """Take ``(member, stamp)`` of masters whose copies were enqueued."""

    def release(self, ticket: int, stream: int, /) -> tuple[int, ...] | None:
        """The work that uses the unit has been queued on `stream`. Returns as `acquire` does."""

    def download(self, target: int, source: int, nbytes: int, stream: int, /) -> None:
        """Copy device bytes written by `stream` to host address `target`; waits (counted)."""

    def trip_out(self, target: int, source: int, nbytes: int, stream: int, /) -> int:
        """Queue a copy of device bytes that `stream` computes to locked host memory.

        The host does not wait. The source is the caller's again after `trip_join`. Returns a
        ticket.
        """

    def trip_home(self, target: int, source: int, nbytes: int, stream: int, /) -> int:
        """As `trip_out`, of bytes that go home to stay: gradients, and what was stepped."""

    def trip_in(self, target: int, source: int, nbytes: int, stream: int, /) -> int:
        """Queue a copy of locked host bytes at `source` to memory allocated on `stream`.

        Returns a ticket; the target may be used after `trip_join`.
        """

    def trip_back(self, ticket: int, target: int, stream: int, /) -> int:
        """Queue the copy of what left by `ticket` to memory allocated on `stream`.

        Returns a ticket of its own; the target may be used after `trip_join`.
        """

    def trip_join(self, ticket: int, stream: int, /) -> None:
        """Let work that is queued from now on come after the copy."""

    def trip_arrived(self, ticket: int, /) -> bool:
        """Whether the copy has ended; waits for nothing."""

    def trip_await(self, ticket: int, /) -> None:
        """Wait on the host until the copy has ended (counted)."""

    def trip_end(self, ticket: int, /) -> None:
        """Join the trip, if that was not done, and forget it: its host memory may be used again."""

    def spin(self, stream: int, nanoseconds: int, /) -> None:
        """Keep `stream` busy (at most ten seconds), so that tests can make copies race a kernel."""

    def hold(self) -> None:
        """Trainable masters may be rewritten from now on: drop their copies, prefetch none."""

    def is_locked(self, memory: int, nbytes: int, /) -> bool:
        """Whether the engine reads and writes all of these host bytes in place."""

    def rest(self) -> None:
        """As `hold`, but their copies stay: `resume` trusts them, and `hold` drops them."""

    def settle(self) -> None:
        """Wait until nothing that is queued reads masters: any of them may be rewritten then."""

    def resume(self) -> None:
        """They are stable again (an optimizer step ended); a forward's acquire does this too."""

    def refresh(self, model: int, /) -> None:
        """Every device copy of the model is stale."""

    def set_verify(self, on: bool, /) -> None:
        """Hash whole masters instead of samples at every hit."""

    def stats(self, model: int = -1) -> Stats:
        """One consistent snapshot, of one model or (-1) of the whole engine."""

    def journal_start(self, entries: int, /) -> None:
        """Keep a journal of the latest `entries` until `journal_stop`; no driver call is made."""

    def journal_read(
        self, first: int, /
    ) -> tuple[int, float, list[tuple[int, int, float, int, int]]]:
        """Entries from number `first` on, a few thousand at most; they stay in the journal.

        Returns (number of the first one returned, clock, [(deed, unit, clock when it was done,
        bytes, detail)]); see enum oo_deed. The clock is the host's, in seconds; on the simulated
        device its virtual one.
        """

    def journal_stop(self) -> None: ...
    def trace_start(self) -> None: ...
    def trace_stop(self) -> list[TraceRow]: ...
    def residents(self) -> list[tuple[int, int, int, int]]:
        """[(unit, address, nbytes, pins)] of the arena, by address."""

    def unit_waits(self) -> dict[int, tuple[int, int, float]]:
        """{unit: (timed waits, stalls among them, seconds of those)}."""

    def visits(self, model: int, /) -> list[tuple[int, int]]:
        """[(unit, kind)] of the latest uses of the model's units, oldest first."""

    def expect(self, visits: list[tuple[int, int]], /) -> None:
        """Predict this sweep of (unit, kind), which an earlier run has learned."""

    def pace(self, model: int, /) -> tuple[list[tuple[int, int]], int]:
        """What is measured so far: [(unit, nanoseconds of a forward)], and the link's bytes/s.

        The bytes are those that units have on the device; 0 of them: not known.
        """

    def expect_pace(self, pace: list[tuple[int, int]], link_bps: int, /) -> None:
        """Plan by this, as `pace` tells it, until it is measured: an earlier run has."""

def live() -> dict[str, int]:
    """Objects of this extension alive now: {"engines", "buffers", "buffer_bytes"}."""

def driver_probe(library: str | None = None) -> tuple[int, int]:
    """(driver version, number of devices); `DriverError` or `OffloadError` says why not."""

def coded_room(kind: int, count: int, /) -> int:
    """How many bytes `encode` needs room for, to encode `count` weights."""

def encode(kind: int, coded: int, nbytes: int, threads: int, weights: int, count: int, /) -> int:
    """Encode `count` weights at an address to `coded`, where `nbytes` are free.

    Everything is decoded again, and compared. The GIL is released. Returns the bytes written.
    """

def decode(kind: int, coded: int, nbytes: int, threads: int, weights: int, count: int, /) -> None:
    """Decode what `encode` has written; `ValueError` where it is damaged. The GIL is released."""

def compare_coded(
    kind: int, coded: int, nbytes: int, threads: int, weights: int, count: int, /
) -> None:
    """Raise `ValueError` unless `coded` holds these very weights. The GIL is released."""

def check_coded(
    kind: int, coded: int, nbytes: int, threads: int, weights: int, count: int, /
) -> None:
    """Raise `ValueError` where a checksum differs; `weights` is not read. The GIL is released."""

def fingerprint(address: int, nbytes: int, /) -> int:
    """A hash of all bytes. The GIL is released."""

def pages_written(address: int, nbytes: int, /) -> bool | None:
    """Whether anything was written to a private, copy-on-write mapping of a file.

    By pages: other data on the first and the last page is counted as well. None where the system
    does not say.
    """

def section_create(nbytes: int, /) -> int:
    """Return memory for processes to share: zeros, without a name, gone with its last process.

    On Linux it is the descriptor of a file, which may grow and never shrinks; on Windows a handle.
    `OSError` where the system makes none.
    """

def section_take(process: int, theirs: int, /) -> int:
    """Return this process's own of what goes by `theirs` in another process of this user.

    `OSError` where the system refuses it.
    """

def section_close(section: int, /) -> None:
    """Close it; what of it is mapped stays until it is unmapped."""

def pages_show(address: int, nbytes: int, descriptor: int, begin: int, /) -> None:
    """Let mapped pages show a file from `begin` on: privately, and copied on write.

    It needs no open file afterwards. `OSError` where that is not possible. On Windows only pages of
    a section can, all of it at once, while no code reads them.
    """

def pages_own(address: int, nbytes: int, /) -> bool:
    """Copy the pages of such a mapping, where they are, to memory that is no file's.

    What is written to them meanwhile may be lost. False, and as it was, where there is no memory,
    or on another system than Linux. The GIL is released.
    """
