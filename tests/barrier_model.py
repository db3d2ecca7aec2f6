"""Runs a kernel's TileLang program as Python, a thread a warp, to see whether some order of events stops it for ever.

TileLang is replaced by a stand-in of which only control flow, barriers and the tables' numbers are real, those that
macros write too (T.Ref): what moves or computes data does nothing, but an element that a warp's first thread takes of
an operand must be there. A barrier is as the hardware has it: who waits for a parity goes on if the phase in progress
has the other one, so that a warp which is late by two phases waits for ever. What TMA loads arrives whenever the
schedule lets it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import random
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

WARP = 32


class Stuck(Exception):
    """Nothing can go on any more."""


class _Ended(BaseException):
    """Thrown into the warps of a block that is given up."""


class _Returned(BaseException):
    """Thrown by a warp whose threads return."""


class Value:
    """Data, of which nothing is known; as an array it has a shape."""

    def __init__(self, shape: Sequence[int] = (), dtype: str = "float32", numbers: Any = None) -> None:
        self.shape, self.dtype, self.numbers, self.data = tuple(shape), dtype, numbers, self
        self.name = ""
        """Of an operand, once `run` has given it to a program."""

    def __getitem__(self, index: Any) -> Any:
        if self.name:
            _here.warp.block.used.add(self.name)
            if _here.warp.number not in _here.warp.block.aware:
                _here.warp.block.early.add(self.name)
        return self if self.numbers is None else int(self.numbers[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self[index]

    def __bool__(self) -> bool:
        return False

    def _same(self, *_: Any) -> Value:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __mod__ = __and__ = __or__ = __invert__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = object.__hash__


class Operand(Value):
    """An array of the caller's: its elements are inside. (What TMA moves may lie outside, where nothing is moved.)"""

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        if all(isinstance(place, int) for place in places):
            assert len(places) == len(self.shape), f"{len(places)} indices of an array of shape {self.shape}"
            if not all(0 <= place < size for place, size in zip(places, self.shape, strict=True)):
                raise IndexError(f"element {places} of an array of shape {self.shape}")
        return super().__getitem__(index)


class Barrier:
    """An mbarrier, or one of the named barriers."""

    def __init__(self, count: int) -> None:
        self.count, self.left, self.loads, self.phase = count, count, 0, 0
        self._aware, self._aware_since = False, sys.maxsize

    def arrive(self, threads: int) -> None:
        self._aware |= _here.warp.number in _here.warp.block.aware
        self.left -= threads
        if self.left < 0:
            raise AssertionError(f"{-self.left} arrivals more than the {self.count} of a phase")
        self.complete()

    def complete(self) -> None:
        if self.left == 0 and self.loads == 0:
            self.left, self.phase = self.count, self.phase + 1
            if self._aware:
                self._aware_since = min(self._aware_since, self.phase)

    def tell(self) -> None:
        """The warp goes on behind the phase that is complete, and so behind what those who arrived had waited for."""
        if self.phase >= self._aware_since:
            _here.warp.block.aware.add(_here.warp.number)

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


@contextlib.contextmanager
def _on_one_processor() -> Iterator[None]:
    """For this thread and those that it starts, of which one runs at a time: to hand over takes half as long there."""
    if not hasattr(os, "sched_setaffinity"):  # outside Linux
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class Block:
    """One block of a kernel: its warps, barriers, and loads on their way."""

    def __init__(self, random_: random.Random, late: int | None) -> None:
        self.random, self.late = random_, late
        self.barriers: list[Any] = []
        self.named: dict[int, Barrier] = {}
        self.loads: list[Barrier] = []
        self.shared: list[Value] = []
        self.warps: list[Warp] = []
        self.error: BaseException | None = None
        self._over = threading.Event()
        self.waited: set[int] = set()
        """Warps that have waited for the kernel before this one, ..."""
        self.aware: set[int] = set()
        """... and who has gone on behind such a warp: a phase of a barrier is not complete before all have arrived."""
        self.used: set[str] = set()
        """Operands of which some warp has used an element, or taken its address, ..."""
        self.early: set[str] = set()
        """... and before it was aware of that kernel's end."""
        self.hasty: set[int] = set()
        """Warps that let the next kernel begin before that."""

    def run(self, body: Callable[[], None], threads: int) -> None:
        """Raises Stuck with what everybody waits for."""
        with _on_one_processor():
            self.warps = [Warp(self, number, body) for number in range(threads // WARP)]
            self.go_on(None)
            self._over.wait()
            for warp in self.warps:
                warp.end()
        if self.error is not None:
            raise self.error

    def go_on(self, here: Warp | None) -> bool:
        """Called by who has had its turn: lets the warp go on that the schedule chooses; whether that is the same."""
        chosen = None
        try:
            chosen = self._choose()
        except BaseException as error:
            self.error = error
        if chosen is None:
            self._over.set()
        elif chosen is not here:
            chosen.turn.release()
        return chosen is not None and chosen is here

    def _choose(self) -> Warp | None:
        """A warp, once the loads have arrived that do so before it goes on; None when all is over."""
        while self.error is None and (alive := [warp for warp in self.warps if not warp.done]):
            # Of a late warp the schedule thinks when nobody else can go on, and of loads when no warp can.
            if self.late is not None:
                for warp in alive:
                    if warp.number != self.late and warp.able():
                        return warp
            choices: list[Any] = [warp for warp in alive if warp.able()]
            if self.loads:
                choices.append("load")
            if not choices:
                raise Stuck("; ".join(f"warp {warp.number} waits for {warp.waits_for()}" for warp in alive))
            choice = self.random.choice(choices) if self.late is None else choices[-1]
            if choice != "load":
                return choice
            barrier = self.loads.pop(self.random.randrange(len(self.loads)))
            barrier.loads -= 1
            barrier.complete()
        return None


class Warp:
    """A warp's thread. One at a time runs, and chooses the next."""

    def __init__(self, block: Block, number: int, body: Callable[[], None]) -> None:
        self.block, self.number, self.done = block, number, False
        self.allocated = self.allocated_shared = 0
        self.able, self.waits_for = _ITS_TURN
        self._ended = False
        self.turn = threading.Lock()  # released by another thread
        self.turn.acquire()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        self.turn.acquire()
        _here.warp = self
        try:
            if not self._ended:
                body()
        except (_Ended, _Returned):
            pass
        except BaseException as error:
            self.block.error = self.block.error or error
        self.done = True
        if not self._ended:
            self.block.go_on(self)

    def wait(self, able: Callable[[], bool], what: Callable[[], str]) -> None:
        """Called by the warp: until the schedule chooses it while it is able to go on."""
        self.able, self.waits_for = able, what
        if not self.block.go_on(self):
            self.turn.acquire()
        if self._ended:
            raise _Ended
        self.able, self.waits_for = _ITS_TURN

    def end(self) -> None:
        self._ended = True
        self.turn.release()
        self._thread.join()


_ITS_TURN: tuple[Callable[[], bool], Callable[[], str]] = (lambda: True, lambda: "its turn")


class _Here(threading.local):
    warp: Warp


_here = _Here()


class _Kernel:
    """`with T.Kernel(...)`: the first block's indices."""

    def __init__(self, grid: Sequence[int]) -> None:
        self.index = (0,) * len(grid)

    def __enter__(self) -> Any:
        return self.index if len(self.index) > 1 else self.index[0]

    def __exit__(self, *_: Any) -> None:
        pass


class _Written(dict[int, Any]):
    """What a macro leaves in those of its parameters that are T.Ref, by their places."""


def _after(found: Any, place: int, value: Any) -> Any:
    """What a variable is after a call that has `found` as its result, and had it at this place."""
    return found.get(place, value) if isinstance(found, _Written) else value


class _References(ast.NodeTransformer):
    """Of a function: who calls a macro takes the variables that it has written, which TileLang takes from T.Ref."""

    def __init__(self, function: ast.FunctionDef) -> None:
        stored = (x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
        self._variables = {name.id for name in stored}

    def visit_Expr(self, statement: ast.Expr) -> Any:
        call = statement.value
        if not isinstance(call, ast.Call):
            return statement
        names = {n: x.id for n, x in enumerate(call.args) if isinstance(x, ast.Name) and x.id in self._variables}
        if not names or any(isinstance(x, ast.Starred) for x in call.args):
            return statement
        taken = ast.parse("\n".join(f"{name} = _after(_found, {n}, {name})" for n, name in names.items())).body
        found = ast.Assign([ast.Name("_found", ast.Store())], call, lineno=statement.lineno)
        return [found, *taken]


def with_references(function: Callable[..., Any]) -> Callable[..., Any]:
    """A macro, or a program, as Python has it, whose variables are numbers; it sees those of the function around it."""
    code = function.__code__
    inner = _code_with_references(code.co_filename, code)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    known = {**function.__globals__, "_after": _after, "_Written": _Written}
    closure = tuple(cells[name] for name in inner.co_freevars)
    made = types.FunctionType(inner, known, function.__name__, function.__defaults__, closure)
    made.__annotations__ = function.__annotations__
    return made


@functools.cache  # macros are made anew with every program
def _code_with_references(file: str, code: types.CodeType) -> types.CodeType:
    """What a function with this code, of this file, becomes in `with_references`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list = []
    tree = _References(tree).visit(tree)
    parameters = enumerate(tree.args.args)
    references = {n: x.arg for n, x in parameters if x.annotation and ast.unparse(x.annotation) == "T.Ref"}
    if references:
        tree.body += ast.parse(f"return _Written({{{', '.join(f'{n}: {x}' for n, x in references.items())}}})").body
    for x in tree.args.args:
        x.annotation = None
    around = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [tree]
    module = compile(ast.fix_missing_locations(ast.Module([around], [])), file, "exec")
    (outer,) = (x for x in module.co_consts if isinstance(x, types.CodeType))
    (inner,) = (x for x in outer.co_consts if isinstance(x, types.CodeType))
    return inner


class Language(types.ModuleType):
    """`tilelang.language`; everything that is not here does nothing."""

    int32 = staticmethod(lambda x=0: x)
    float32 = staticmethod(lambda x=0.0: x)
    prim_func = macro = staticmethod(lambda f: with_references(f))
    serial = unroll = staticmethod(range)
    min, max = staticmethod(min), staticmethod(max)
    truncdiv = staticmethod(lambda a, b: a // b)
    truncmod = staticmethod(lambda a, b: a % b)
    shift_right = staticmethod(lambda a, b: a >> b)
    ceildiv = staticmethod(lambda a, b: -(-a // b))
    if_then_else = Select = staticmethod(lambda condition, a, b: a if condition else b)
    cast = staticmethod(lambda x, *_: x)
    address_of = staticmethod(lambda x: x)  # of an array that nothing is known of: the array
    access_ptr = staticmethod(lambda x, *_: x)
    GemmWarpPolicy = types.SimpleNamespace(FullRow=None)
    Tensor = staticmethod(lambda shape, dtype: tuple(shape))

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__("tilelang.language")
        self._sizes = sizes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: Value()

    def dynamic(self, names: str) -> Any:
        found = tuple(self._sizes[name.strip()] for name in names.split(","))
        return found if len(found) > 1 else found[0]

    def Kernel(self, *grid: int, **_: Any) -> _Kernel:
        return _Kernel(grid)

    def Parallel(self, *_: Any) -> Iterator[Any]:
        return iter(())

    def thread_return(self) -> None:
        raise _Returned

    def get_thread_binding(self) -> int:
        return _here.warp.number * WARP

    def alloc_var(self, dtype: str) -> Any:
        return 0

    def call_extern(self, dtype: str, name: str, *operands: Any) -> Any:
        if name == "jax_qla_find_chunk":
            operands[0].numbers = self._sizes["chunk"]
        if name == "jax_qla_find_chunk_in_window":
            operands[0].numbers = (*self._sizes["chunk"], 1)
        if name in ("jax_qla_slow_first", "jax_qla_long_first", "jax_qla_zero_first"):
            return operands[-1]
        if name == "jax_qla_item":
            operands[0].numbers = (self._sizes.get("item", 0), 0, 0)
        if name == "jax_qla_in_halves":
            operands[0].numbers = (0, 0, self._sizes["half"])
            return 1
        if name == "__any_sync":  # of what is the same for all threads
            return int(bool(operands[1]))
        if name == "jax_qla_uncut":
            return self._sizes.get("uncut", 0)
        if name == "jax_qla_either":  # of two tables, of which one is looked into
            return operands[1 if operands[0] else 2]
        if name == "jax_qla_none_is_zero":  # `compose` has products
            return 0
        return -1 if dtype == "int32" else Value()  # of jax_qla_reach: all chunks matter

    def alloc_shared(self, shape: Sequence[int], dtype: str) -> Value:
        warp = _here.warp
        if warp.allocated_shared == len(warp.block.shared):
            warp.block.shared.append(Value(shape, dtype))
        warp.allocated_shared += 1
        return warp.block.shared[warp.allocated_shared - 1]

    alloc_fragment = alloc_local = staticmethod(Value)

    def alloc_barrier(self, counts: int | Sequence[int]) -> Any:
        warp = _here.warp
        if warp.allocated == len(warp.block.barriers):
            counts = [counts] if isinstance(counts, int) else counts
            warp.block.barriers.append([Barrier(count) for count in counts])
        warp.allocated += 1
        return warp.block.barriers[warp.allocated - 1]

    def barrier_arrive(self, barrier: Any) -> None:
        _one(barrier).arrive(WARP)
        self._turn()

    def barrier_wait(self, barrier: Any, parity: int) -> None:
        found, warp = _one(barrier), _here.warp

        def what() -> str:
            which = next((i, x.index(found)) for i, x in enumerate(warp.block.barriers) if found in x)
            return f"phase {parity} of barrier {which}, which is in phase {found.phase}"

        warp.wait(lambda: found.passed(parity), what)
        found.tell()

    def sync_threads(self, number: int = 0, threads: int | None = None) -> None:
        block = _here.warp.block
        barrier = block.named.setdefault(number, Barrier(threads or len(block.warps) * WARP))
        phase = barrier.phase
        barrier.arrive(WARP)
        _here.warp.wait(lambda: barrier.phase > phase, lambda: f"named barrier {number}")
        barrier.tell()

    def tma_copy(self, source: Any, target: Any, barrier: Any = None, **_: Any) -> None:
        if barrier is not None:
            found = _one(barrier)
            found.loads += 1
            _here.warp.block.loads.append(found)
            self._turn()

    def pdl_sync(self) -> None:
        _here.warp.block.waited.add(_here.warp.number)
        _here.warp.block.aware.add(_here.warp.number)

    def pdl_trigger(self) -> None:
        if _here.warp.number not in _here.warp.block.waited:
            _here.warp.block.hasty.add(_here.warp.number)

    def _turn(self) -> None:
        _here.warp.wait(*_ITS_TURN)


def _one(barrier: Any) -> Barrier:
    (found,) = barrier if isinstance(barrier, list) else [barrier]
    return found


def replace_tilelang(patch: pytest.MonkeyPatch, sizes: Mapping[str, Any]) -> None:
    """Lets `import tilelang.language` give the stand-in, with these values of the dynamic sizes; "chunk" is what a
    block's slot is found to have: first row, rows, rows of no sequence."""
    language, layout, tilelang = Language(sizes), types.ModuleType("tilelang.layout"), types.ModuleType("tilelang")
    layout.Fragment = layout.make_full_bank_swizzled_layout = lambda *_, **__: Value()  # type: ignore[attr-defined]
    tilelang.language, tilelang.layout = language, layout  # type: ignore[attr-defined]
    for module in (tilelang, language, layout):
        patch.setitem(sys.modules, module.__name__, module)


def run(
    program: Callable[..., Any],
    threads: int,
    operands: Mapping[str, Any],
    *,
    seed: int = 0,
    late: int | None = None,
) -> Block:
    """Runs the first block, and returns it.

    Args:
        program: the prim_func, made while TileLang is replaced.
        threads: of the block.
        operands: tables and scalars by name; all others are data of the shapes that the program gives them.
        seed: of the order in which warps go on and loads arrive.
        late: a warp that goes on only when no other can; loads then arrive only when nothing else happens.

    Raises:
        Stuck: nothing can go on any more.
        IndexError: a thread takes an element that an operand does not have.
    """
    given = {
        name: operands[name]
        if name in operands
        else Operand(x.annotation)
        if isinstance(x.annotation, tuple)
        else Value()
        for name, x in inspect.signature(program).parameters.items()
    }
    for name, x in given.items():
        if isinstance(x, Value):
            x.name = name
    ran = Block(random.Random(seed), late)
    ran.run(lambda: program(**given), threads)
    return ran
