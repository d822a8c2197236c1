"""How the ranks of a world meet: a store on rank 0's machine, and who is missing while one waits there."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from femto_ops.collectives import c10d

FIRST_WORD_S, NEXT_WORD_S = 30.0, 60.0
LONGEST_PAUSE_S = 1.0


@attrs.frozen(kw_only=True)
class MeetingPlace:
    """Where the ranks of a world meet, and this rank's number among them."""

    host: str
    port: int
    rank: int
    world_size: int
    launcher_hosts: bool
    """Whether the launcher has opened the store; otherwise rank 0 does."""
    attempt: str
    """Names this start of the world: the store of a launcher outlives ranks that it starts again."""

    def __str__(self) -> str:
        return f"MASTER_ADDR = {self.host}, MASTER_PORT = {self.port}"


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_place(environment: Mapping[str, str]) -> MeetingPlace | None:
    """Return the meeting place that torchrun, or whoever starts the ranks, describes; None: there is one rank alone.

    Raises ValueError with a sentence that names the variable which is missing or wrong.
    """
    if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
        return None
    for name in NEEDED:
        if not environment.get(name):
            raise ValueError(f"{name} is not set in the environment; whoever starts ranks sets {', '.join(NEEDED)}")
    world_size = read_number(environment, "WORLD_SIZE", least=1)
    rank = read_number(environment, "RANK", most=world_size - 1)
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_one_machine = environment.get("LOCAL_WORLD_SIZE", "1") == environment["WORLD_SIZE"]
    return MeetingPlace(
        host=environment["MASTER_ADDR"],
        port=read_number(environment, "MASTER_PORT", least=1, most=2**16 - 1),
        rank=rank,
        world_size=world_size,
        launcher_hosts=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # On one machine torchrun keeps its store over a restart, and with it the addresses of processes that died.
        attempt=f"restart-{restarts if on_one_machine else 0}",
    )


def read_number(
    environment: Mapping[str, str], name: str, *, default: str = "", least: int = 0, most: int = 2**31
) -> int:
    """Return the number in a variable. Raises ValueError where it is not whole, or not from `least` to `most`."""
    text = environment.get(name) or default
    if not (text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
        limits = f"from {least} to {most}" if most < 2**31 else f"from {least}"
        raise ValueError(f"{name} = {text!r} (in the environment): must be a whole number {limits}")
    return int(text)


def meet(place: MeetingPlace, timeout_s: float, say: Callable[[str], None]) -> Any:
    """Return the world's store once all its ranks are there.

    After 30 s, and each minute from then on, one rank hands `say` a sentence about who is missing. Raises `OSError`
    where the port is in use, and `TimeoutError` where somebody is missing after `timeout_s` seconds.
    """
    wait = _Wait(timeout_s, say)
    hosts = place.rank == 0 and not place.launcher_hosts
    while problem := _unreachable(place, hosts=hosts):
        host = "the launcher" if place.launcher_hosts else "rank 0"
        wait.pause(f"rank {place.rank} cannot reach {host} at {place} ({problem})")
    store = join(place, timeout_s, hosts=hosts)
    store.set(_key(place.rank), "here")
    while missing := [rank for rank in range(place.world_size) if not store.check([_key(rank)])]:
        first = next(rank for rank in range(place.world_size) if rank not in missing)
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        sentence = f"rank{'s' if len(missing) > 1 else ''} {names} of {place.world_size} not there yet at {place}"
        wait.pause(sentence, aloud=first == place.rank)
    return store


def join(place: MeetingPlace, timeout_s: float, *, hosts: bool = False) -> Any:
    """Return the store at `place`, without waiting for other ranks; this process opens it where it `hosts`."""
    store = c10d.TCPStore(
        place.host,
        place.port,
        None,
        hosts,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return c10d.PrefixStore(place.attempt, store)


class _Wait:
    """Waits in pauses that become longer, and says now and then what for."""

    def __init__(self, timeout_s: float, say: Callable[[str], None]) -> None:
        self._begun, self._timeout, self._say = time.monotonic(), timeout_s, say
        self._next_word, self._pause = FIRST_WORD_S, 0.01

    def pause(self, sentence: str, *, aloud: bool = True) -> None:
        """Wait a moment; `sentence` says for what. Raises `TimeoutError` where that has taken too long."""
        waited = time.monotonic() - self._begun
        if waited > self._timeout:
            raise TimeoutError(f"{sentence}, after {waited:.0f} s; start every rank, or raise --train.timeout")
        if waited > self._next_word:
            self._next_word += NEXT_WORD_S
            if aloud:
                self._say(f"{sentence}; waited {waited:.0f} s so far")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


def _unreachable(place: MeetingPlace, *, hosts: bool) -> str:
    """Return why the store cannot be reached now, or nothing. Raises `OSError` where this rank cannot open it."""
    try:
        family, *_ = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        if hosts:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", place.port))
        else:
            socket.create_connection((place.host, place.port), timeout=LONGEST_PAUSE_S).close()
    except OSError as error:
        if hosts and not isinstance(error, socket.gaierror):
            raise OSError(f"port {place.port} cannot be opened on rank 0: {error.strerror}") from None
        return error.strerror or str(error)
    return ""


def _key(rank: int) -> str:
    return f"rank-{rank}-is-there"
