"""The ranks of one machine: how they meet, and what they send one another.

They meet by the store of torch's process group, which says at which socket the first of them waits,
and talk over sockets from then on. These end at once when a process does, killed or not, so that no
rank waits for one that is gone. On Linux they are Unix sockets, which pass descriptors as well;
their names are in no file system, and end with the process that has them. Elsewhere they are of the
loopback network: a process that connects there shows by a word out of the store that it is a rank,
and memory goes to processes of one user, by the system's own check.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OffloadError

_LENGTH = struct.Struct("!Q")
_PEER = struct.Struct("3i")  # process, user, group: struct ucred
_HELLO_S = 20  # after it has come, before a rank says who it is
_MOST_BYTES = 1 << 30  # of one message: more is no message of ours
_meetings = 0  # of this process: the ranks have as many
_found: Place | None = None  # this process's, by a meeting, if its launcher has not said it
_together: weakref.WeakSet[LocalRanks] = weakref.WeakSet()


@dataclass(frozen=True)
class Place:
    """Which of the job's processes a process is.

    Attributes
    ----------
    rank, world : int
        Its number in the job, and how many there are.
    local_rank, local_world : int
        The same on its machine.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int

    def as_row(self) -> dict[str, int]:
        """Return it for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        return in_words(vars(self))


def place() -> Place | None:
    """Return the place of this process, by what its launcher has set; None where none has."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, here = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
    except (KeyError, ValueError):
        return _found
    if not (0 <= local < here <= world and 0 <= rank < world):
        return None
    return Place(rank, world, local, here)


def in_words(at: Mapping[str, int]) -> str:
    """Return a `Place`, as a mapping, for people."""
    where = f"rank {at['rank']} of {at['world']}"
    if at["local_world"] != at["world"]:
        where += f" ({at['local_rank']} of {at['local_world']} on its machine)"
    return where


def job() -> str:
    """Return what the ranks of a job have alike, and those of another have not."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names)


class LocalRanks:
    """The ranks of this machine, while they hold together; made by `meet`.

    Parameters
    ----------
    at : Place
        Of this process.
    peers : dict of int to socket
        By local rank: of the first rank all others, of any other the first.
    timeout_s : float
        How long a rank waits for the others.

    Attributes
    ----------
    passes_files : bool
        Whether sockets pass descriptors, and say whose process is at the other end.
    """

    passes_files = sys.platform == "linux"

    def __init__(self, at: Place, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.at = at
        self.timeout_s = timeout_s
        self._peers = peers
        self._pid = os.getpid()
        self._ended = ""  # why they are apart
        _together.add(self)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides where one has to."""
        return self.at.local_rank == 0

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        """Tell the others `value`, and return what all of them say, in the order of their ranks.

        Parameters
        ----------
        what : str
            What they are at: all of them have to be at the same.
        value : optional
            What JSON can say.

        Raises
        ------
        OffloadError
            A rank has failed, is gone, is at something else, or did not come in time.
        """
        if os.getpid() != self._pid:
            raise OffloadError("a forked child takes no part in what ranks do together")
        if self._ended:
            raise _as_said(self._ended)
        try:
            if self.is_first:
                return self._gather(what, value)
            self._tell({"at": what, "value": value})
            answer = self._hear(0, self._deadline())
            if "failed" in answer:
                raise _as_said(answer["failed"])
            return list(answer["values"])
        except OffloadError as error:
            self.fail(str(error))
            raise
        except BaseException as error:
            self.fail(_words(self.at.local_rank, error))
            raise

    def fail(self, why: str) -> None:
        """Let the others know that this rank cannot go on; it sends nothing after that."""
        if not self._ended and os.getpid() == self._pid:
            self._ended = why
            with contextlib.suppress(OSError):
                self._tell({"failed": why})
        self.close()

    def fail_with(self, error: BaseException) -> None:
        """As `fail`, because of an error of this rank."""
        self.fail(_words(self.at.local_rank, error))

    def close(self) -> None:
        """Part from the others."""
        self._ended = self._ended or "this rank has parted from the others: it was detached"
        self.let_go()

    def let_go(self) -> None:
        """Close the connections, in a forked child too: nothing is sent from there."""
        while self._peers:
            self._peers.popitem()[1].close()

    def share_file(self, file: int | None) -> int:
        """Give all ranks the first one's memory, and return what it goes by in this rank.

        Parameters
        ----------
        file : int, optional
            Of the first rank: see `oracle_offload._core.section_create`.

        Raises
        ------
        OffloadError
            The system refused it to some rank.
        """
        from .. import _core

        refused, here = "", file
        try:
            here = (self._pass if self.passes_files else self._take)(file)
        except OSError as error:  # in time it did not come, or the first rank is gone
            refused = str(error)

        def check() -> None:
            if refused:
                raise OffloadError(
                    f"rank {self.at.local_rank} of this machine was refused the descriptor of the "
                    f"weights that its ranks share ({refused}): raise the limit of open files "
                    "(ulimit -n), and let no sandbox forbid passing them."
                )

        try:
            on_all(self, "descriptor", check)
        except BaseException:
            if not self.is_first and here is not None:
                _core.section_close(here)
            raise
        assert here is not None
        return here

    def _pass(self, file: int | None) -> int:
        """Send the descriptor to all others, or return what has come."""
        if file is not None:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):  # of one that is gone, which is seen next
                    socket.send_fds(peer, [b"f"], [file])
            return file
        peer = self._peers[0]
        peer.settimeout(self.timeout_s)
        _, found, _, _ = socket.recv_fds(peer, 1, 1, _CLOSE_ON_EXEC)
        if not found:
            raise OSError("too many open files?")
        return found[0]

    def _take(self, file: int | None) -> int:
        """Say what it goes by in the first rank, of which the others ask the system for it."""
        from .. import _core

        owner, theirs = self.exchange("offered", [os.getpid(), file])[0]
        return _core.section_take(owner, theirs) if file is None else file

    # ---- messages ----

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def _tell(self, message: dict[str, Any]) -> None:
        """Send to all peers; one that is gone is noticed when it is read from."""
        content = json.dumps(message).encode()
        for peer in list(self._peers.values()):
            with contextlib.suppress(ConnectionError):
                peer.settimeout(self.timeout_s)
                peer.sendall(_LENGTH.pack(len(content)) + content)

    def _hear(self, rank: int, until: float) -> dict[str, Any]:
        try:
            return _receive(self._peers[rank], until)
        except TimeoutError:
            raise OffloadError(
                f"rank {rank} of this machine did not answer within {self.timeout_s:.0f} s, while "
                f"rank {self.at.local_rank} waited for it: all ranks have to make the same calls."
            ) from None
        except (OSError, ValueError):
            raise OffloadError(
                f"rank {rank} of this machine is gone: it was killed, has ended or was detached, "
                "while others wait for it. The cause is in its own output, or the kernel's log."
            ) from None

    def _gather(self, what: str, value: Any) -> list[Any]:
        """As the first rank: receive from all, and send all what all have said."""
        values: dict[int, Any] = {0: value}
        until = self._deadline()
        waiting = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            waiting.register(peer, selectors.EVENT_READ, rank)
        with waiting:
            while len(values) < self.at.local_world:
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready:
                    late = [rank for rank in self._peers if rank not in values]
                    self._hear(late[0], until)  # which says so
                for key, _ in ready:
                    rank = key.data
                    message = self._hear(rank, until)
                    if "failed" in message:
                        raise _as_said(message["failed"])
                    if message["at"] != what:
                        raise OffloadError(
                            f"the ranks of this machine are at different calls: rank 0 at "
                            f"'{what}', rank {rank} at '{message['at']}'. All of them have to "
                            "attach and refresh alike, in the same order."
                        )
                    values[rank] = message["value"]
                    waiting.unregister(self._peers[rank])
        in_order = [values[rank] for rank in range(self.at.local_world)]
        self._tell({"values": in_order})
        return in_order


def _leave_child() -> None:
    """In a forked child: were its copies open, no rank would see that this one is gone."""
    for ranks in list(_together):
        ranks.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)


_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def _as_said(why: str) -> OffloadError:
    """Return the error of another rank, or of before."""
    error = OffloadError(why)
    return error  # noqa: RET504 - its text is no message of this place


def _words(rank: int, error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return f"rank {rank} of this machine failed: {text}"


def _receive(peer: socket.socket, until: float) -> dict[str, Any]:
    (nbytes,) = _LENGTH.unpack(_receive_bytes(peer, _LENGTH.size, until))
    if nbytes > _MOST_BYTES:
        raise ConnectionResetError(f"a message of {nbytes} bytes is none of ours")
    message: dict[str, Any] = json.loads(_receive_bytes(peer, nbytes, until))
    return message


def _receive_bytes(peer: socket.socket, nbytes: int, until: float) -> bytes:
    content = bytearray()
    while len(content) < nbytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peer.settimeout(left)
        part = peer.recv(min(nbytes - len(content), 1 << 20))
        if not part:
            raise ConnectionResetError("it has ended")
        content += part
    return bytes(content)


# ---- meeting ----


def meet(version: str) -> LocalRanks:
    """Bring the ranks of this machine together: all of them call it.

    Parameters
    ----------
    version : str
        What all of them have to be alike in.

    Raises
    ------
    OffloadError
        There is no process group, nothing says which ranks are of this machine, or not all of them
        come in time.
    """
    global _meetings, _found
    store, timeout_s = _store()
    at = _found = _place_in_group(store)
    _meetings += 1
    key = f"oracle_offload/{at.rank - at.local_rank}/{_meetings}"
    hello = {**at.as_row(), "version": version, "key": key}
    if at.local_rank == 0:
        return _wait_for_others(store, key, hello, at, timeout_s)
    return _go_to_first(store, key, hello, at, timeout_s)


def _store() -> tuple[Any, float]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if not (dist.is_available() and dist.is_initialized()):
        raise OffloadError(
            "share='node' needs a process group, and there is none: start with torchrun (or "
            "accelerate launch) and call torch.distributed.init_process_group() before attach()."
        )
    store: Any = _get_default_store()
    return store, float(store.timeout.total_seconds())


def _place_in_group(store: Any) -> Place:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    # All ranks say it, for those whose launcher sets no more than this.
    store.set(f"oracle_offload/local/{rank}", os.environ.get("LOCAL_RANK", ""))
    at = place() or _place_by_local_rank(store, rank, world)
    if at is None or (at.rank, at.world) != (rank, world):
        raise OffloadError(
            "share='node' places ranks by RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which "
            f"say {at} here, while the process group has rank {rank} of {world}: start with "
            "torchrun, or set all four alike."
        )
    return at


def _place_by_local_rank(store: Any, rank: int, world: int) -> Place | None:
    """As `place`, where a launcher says no LOCAL_WORLD_SIZE: Lightning's own, accelerate's.

    A machine's ranks follow one another, and its LOCAL_RANK begins with 0.
    """
    import torch.distributed as dist

    said = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": ""}
    local = os.environ.get("LOCAL_RANK", "")
    others = any(os.environ.get(name, value) != value for name, value in said.items())
    if others or not local.isdecimal() or int(local) > rank:
        return None
    first, here = rank - int(local), 1
    try:
        while first + here < world:
            if store.get(f"oracle_offload/local/{first + here}").decode() != str(here):
                break
            here += 1
    except (dist.DistError, RuntimeError) as error:
        raise OffloadError(
            f"share='node': rank {first + here} of the job did not come to attach within "
            f"{store.timeout.total_seconds():.0f} s ({error}). All ranks have to call it."
        ) from error
    return Place(rank, world, int(local), here) if int(local) < here else None


def _wait_for_others(
    store: Any, key: str, hello: dict[str, Any], at: Place, timeout_s: float
) -> LocalRanks:
    peers: dict[int, socket.socket] = {}
    ranks = LocalRanks(at, peers, timeout_s)
    until = time.monotonic() + timeout_s
    with socket.socket(_family(), socket.SOCK_STREAM) as door:
        name = _open(door)
        door.listen(at.local_world)
        store.set(key, name)
        hello = {**hello, "door": name}
        try:
            while len(peers) + 1 < at.local_world:
                door.settimeout(max(1e-3, until - time.monotonic()))
                try:
                    peer, _ = door.accept()
                except TimeoutError:
                    missing = set(range(1, at.local_world)) - set(peers)
                    raise OffloadError(
                        f"share='node': of the {at.local_world} ranks of this machine "
                        f"(LOCAL_WORLD_SIZE), {', '.join(map(str, sorted(missing)))} did not come "
                        f"to attach within {timeout_s:.0f} s. All ranks have to call it; slow ones "
                        "have as long as init_process_group(timeout=...) says."
                    ) from None
                _let_in(peer, hello, peers, until)
        except BaseException as error:
            ranks.fail_with(error)
            raise
    ranks.exchange("meet")
    return ranks


def _family() -> int:
    return socket.AF_UNIX if LocalRanks.passes_files else socket.AF_INET


def _open(door: socket.socket) -> str:
    """Give a socket an address, and return its name, which cannot be guessed."""
    word = secrets.token_hex(16)
    if LocalRanks.passes_files:
        door.bind(f"\0oracle_offload-{word}")
        return f"oracle_offload-{word}"
    if (alone := getattr(socket, "SO_EXCLUSIVEADDRUSE", None)) is not None:
        door.setsockopt(socket.SOL_SOCKET, alone, 1)  # else another process may have the port too
    door.bind(("127.0.0.1", 0))
    return f"{door.getsockname()[1]} {word}"


def _come_to(name: str, peer: socket.socket) -> None:
    """Connect to the socket that `_open` has named so."""
    peer.connect("\0" + name if LocalRanks.passes_files else ("127.0.0.1", int(name.split()[0])))
    _check_user(peer)


def _let_in(
    peer: socket.socket, hello: dict[str, Any], peers: dict[int, socket.socket], until: float
) -> None:
    """Keep a connection of a rank of ours; of any other process it is closed."""
    try:
        _check_user(peer)
        said = _receive(peer, min(until, time.monotonic() + _HELLO_S))
        if not secrets.compare_digest(said["door"], hello["door"]):
            raise ConnectionRefusedError("it does not know the word")
        rank = int(said["local_rank"])
    except (OSError, ValueError, KeyError, TypeError):
        peer.close()
        return
    theirs = {name: said.get(name) for name in ("local_world", "world", "version", "key")}
    ours = {name: hello[name] for name in theirs}
    if theirs != ours or rank in peers or not 0 < rank < hello["local_world"]:
        peers[rank] = peer  # which is to be notified
        raise OffloadError(
            f"share='node': rank {rank} of this machine says {theirs}, rank 0 {ours}: all of them "
            "have to be of one job, with as many GPUs, and of one version."
        )
    peers[rank] = peer


def _check_user(peer: socket.socket) -> None:
    """Refuse a process of another user: any process may have a name, or know one."""
    if not LocalRanks.passes_files:  # there the system gives memory to one user's processes alone
        return
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ConnectionRefusedError(f"it is of user {user}, this one of user {os.geteuid()}")


def _go_to_first(
    store: Any, key: str, hello: dict[str, Any], at: Place, timeout_s: float
) -> LocalRanks:
    import torch.distributed as dist

    peer = socket.socket(_family(), socket.SOCK_STREAM)
    try:
        try:
            name = store.get(key).decode()
        except (dist.DistError, RuntimeError) as error:
            raise OffloadError(
                f"share='node': rank 0 of this machine did not come to attach within "
                f"{timeout_s:.0f} s ({error}). All ranks have to call it."
            ) from error
        peer.settimeout(timeout_s)
        try:
            _come_to(name, peer)
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"share='node': rank {at.local_rank} cannot reach rank 0 of this machine "
                f"({error}): it is gone, or runs on another machine or in another container, which "
                "LOCAL_RANK and LOCAL_WORLD_SIZE take for this one."
            ) from error
        ranks = LocalRanks(at, {0: peer}, timeout_s)
        ranks._tell({**hello, "door": name})
        ranks.exchange("meet")
    except BaseException:
        peer.close()
        raise
    return ranks


def on_all(ranks: LocalRanks, what: str, check: Callable[[], None]) -> None:
    """Make a check on all ranks, and raise on all what it raises on any."""
    why = ""
    try:
        check()
    except OffloadError as error:
        why = str(error)
    for found in ranks.exchange(what, why):
        if found:
            ranks.fail(found)
            raise _as_said(found)
