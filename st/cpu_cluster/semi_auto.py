"""Lets MindSpore's semi-auto parallel front end run on the CPU backend.

What: two changes in the memory of this process. Why: the front end cuts the weights and writes the
strategy files, so a test of checkpoints of several ranks needs the real one, and it refuses every
target but Ascend and GPU.

1. ``libmindspore_frontend.so`` compares the device target with "Ascend" / "GPU" (world group name
   and others) and throws "Invalid backend: CPU". Its constants are private file mappings, so
   writing through /proc/self/mem changes this process' copy only: "GPU" -> "CPU",
   "nccl" -> "mccl", "nccl_world_group" -> "mccl_world_group".
2. No ``mindspore::CommManager`` is registered for "CPU" (the default one claims rank 0 of 2048 and
   creates no groups). One is registered whose virtual table is made with ctypes and which answers
   from ``mindspore.communication``.

Linux, x86-64, the glibc wheels of MindSpore. ``install()`` after ``import mindspore``, before the
first compile.
"""

import ctypes
import glob
import os
import re
import traceback

_KEEP_ALIVE = []
CREATED_GROUPS = {}  # {group name: [world ranks]}, filled by the front end

_REPLACEMENTS = (
    (b"\0GPU\0", b"\0CPU\0"),
    (b"\0nccl_world_group\0", b"\0mccl_world_group\0"),
    (b"\0nccl\0", b"\0mccl\0"),
)


def patch_constants(library: str = "libmindspore_frontend.so") -> dict[str, int]:
    """Rewrites the constants of change 1. Returns {old constant: number of places}."""
    counts, segments = {}, []
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if line.rstrip().endswith(library):
                span, permissions = line.split()[:2]
                low, high = (int(v, 16) for v in span.split("-"))
                if "w" not in permissions:
                    segments.append((low, high))
    with open("/proc/self/mem", "r+b", 0) as memory:
        for low, high in segments:
            memory.seek(low)
            content = memory.read(high - low)
            for old, new in _REPLACEMENTS:
                for hit in re.finditer(re.escape(old), content):
                    memory.seek(low + hit.start())
                    memory.write(new)
                    name = old.strip(b"\0").decode()
                    counts[name] = counts.get(name, 0) + 1
    return counts


def _cow_string(text):
    """An old-ABI (copy-on-write) libstdc++ std::string: {length, capacity, reference count}, then
    the characters."""
    raw = text.encode()
    buffer = ctypes.create_string_buffer(24 + len(raw) + 1)
    ctypes.memmove(buffer, (ctypes.c_uint64 * 2)(len(raw), len(raw)), 16)
    ctypes.memmove(ctypes.addressof(buffer) + 16, ctypes.byref(ctypes.c_int(1 << 20)), 4)
    ctypes.memmove(ctypes.addressof(buffer) + 24, raw, len(raw))
    pointer = ctypes.c_void_p(ctypes.addressof(buffer) + 24)
    _KEEP_ALIVE.extend([buffer, pointer])
    return pointer


def _text(pointer):
    return ctypes.string_at(ctypes.c_void_p.from_address(pointer).value).decode()


def _rank_and_size():
    from mindspore.communication import get_group_size, get_rank

    return get_rank(), get_group_size()


def _create_group(_this, group, ranks):
    try:
        name = _text(group)
        begin, end = (
            ctypes.c_uint64.from_address(ranks).value,
            ctypes.c_uint64.from_address(ranks + 8).value,
        )
        rank_list = (
            list((ctypes.c_uint32 * ((end - begin) // 4)).from_address(begin))
            if end > begin
            else []
        )
        if name not in CREATED_GROUPS:
            CREATED_GROUPS[name] = rank_list
            from mindspore.communication import create_group, get_rank

            if get_rank() in rank_list:
                create_group(name, rank_list)
        return True
    except Exception:  # must not cross into C++; the front end reports the False
        traceback.print_exc()
        return False


def _group_rank(_this, group, out):
    name, rank = _text(group), _rank_and_size()[0]
    if rank in CREATED_GROUPS.get(name, ()):
        rank = CREATED_GROUPS[name].index(rank)
    ctypes.c_uint32.from_address(out).value = rank
    return True


def _group_size(_this, group, out):
    name = _text(group)
    size = len(CREATED_GROUPS[name]) if name in CREATED_GROUPS else _rank_and_size()[1]
    ctypes.c_uint32.from_address(out).value = size
    return True


def register_comm_manager() -> bool:
    """Registers the CommManager of change 2; True if accepted. Raises RuntimeError if the symbol is
    absent."""
    import mindspore

    symbol = "_ZN9mindspore11CommManager8RegisterERKSsRKSt10shared_ptrIS0_E"
    register = None
    for path in sorted(
        glob.glob(os.path.join(os.path.dirname(mindspore.__file__), "lib", "libmindspore_*.so"))
    ):
        try:
            register = getattr(ctypes.CDLL(path), symbol)
            break
        except (OSError, AttributeError):
            continue
    if register is None:
        raise RuntimeError(
            f"mindspore {mindspore.__version__}: no symbol {symbol} in its libraries; "
            "semi-auto parallel on CPU is not possible with this release"
        )
    ptr, flag = ctypes.c_void_p, ctypes.c_bool
    destructor = ctypes.CFUNCTYPE(None, ptr)(lambda this: None)
    create = ctypes.CFUNCTYPE(flag, ptr, ptr, ptr)(_create_group)
    destroy = ctypes.CFUNCTYPE(flag, ptr, ptr)(lambda this, group: True)
    group_rank = ctypes.CFUNCTYPE(flag, ptr, ptr, ptr)(_group_rank)
    group_size = ctypes.CFUNCTYPE(flag, ptr, ptr, ptr)(_group_size)
    rank = ctypes.CFUNCTYPE(ctypes.c_uint32, ptr)(lambda this: _rank_and_size()[0])
    # order of the header: ~CommManager (2 slots), CreateGroupSync, DestroyGroup, GetRankID,
    # GetRankSize, GetRank
    functions = (destructor, destructor, create, destroy, group_rank, group_size, rank)
    table = (ptr * 9)(0, 0, *[ctypes.cast(f, ptr).value for f in functions])
    instance = (ptr * 4)(ctypes.addressof(table) + 16, _cow_string("mccl").value, 0, 0)
    # a shared_ptr without control block
    shared = (ptr * 2)(ctypes.addressof(instance), 0)
    _KEEP_ALIVE.extend([*functions, table, instance, shared])
    register.argtypes, register.restype = [ptr, ptr], flag
    key = _cow_string("CPU")
    return register(ctypes.addressof(key), ctypes.addressof(shared))


def install() -> tuple[dict[str, int], bool]:
    """Returns (number of constants changed, CommManager registered)."""
    import mindspore  # noqa: F401  its libraries must be mapped

    return patch_constants(), register_comm_manager()
