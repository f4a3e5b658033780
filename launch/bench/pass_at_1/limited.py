"""Run a program under limits. execution.py starts this script as a process; it needs only the standard library.

Standard input is one JSON object: program, memory_bytes, file_bytes, cpu_s, passed. Standard output is one line of
JSON: {"outcome": ..., "files": ...}. The outcome is the input's string `passed` if the program ran to its end, else the
name of the exception that ended it; a program that ends the process itself leaves no output. `files` says whether the
kernel keeps the program from writing outside its working folder. A program cannot

- open a socket, start a process, or signal one: the kernel refuses these system calls (seccomp);
- write outside the working folder, where the kernel has Landlock (Linux 5.13);
- take more memory or CPU seconds, or write larger files, than the input allows.

It can read what this user may read; nothing of that leaves the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
import types

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
SIGKILL, EPERM, ENOSYS = 9, 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # what a filter answers; REFUSE takes an errno
LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of a filter
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in what a filter sees of a system call
CLONE_THREAD = 0x10000
X32 = 0x40000000  # numbers from here on are x86-64's second set of system calls
# By machine: its audit number, clone, and the calls that are refused: socket, kill, tkill, tgkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, pidfd_send_signal, pidfd_open, ptrace, process_vm_readv, process_vm_writev, execve, execveat,
# io_uring_setup, unshare, setns, mount, reboot; on x86-64 fork and vfork too.
MACHINES = {
    "x86_64": (
        0xC000003E,
        56,
        (41, 62, 200, 234, 129, 297, 424, 434, 101, 310, 311, 59, 322, 425, 272, 308, 165, 169, 57, 58),
    ),
    "aarch64": (
        0xC00000B7,
        220,
        (198, 129, 130, 131, 138, 240, 424, 434, 117, 270, 271, 221, 281, 425, 97, 268, 40, 142),
    ),
}
CLONE3 = 435
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_VERSION = 1  # flag: ask which version the kernel has
# Bits of Landlock: write a file; remove a folder or a file, make any kind of entry; from version 3 on truncate.
WRITE_FILE, CHANGE_FOLDER, TRUNCATE = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 14


class Instruction(ctypes.Structure):
    """An instruction of a seccomp filter, C's `struct sock_filter`."""

    _fields_ = [("code", ctypes.c_uint16), ("then", ctypes.c_uint8), ("skip", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class Filter(ctypes.Structure):
    """A seccomp filter, C's `struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


def refuse_system_calls() -> None:
    """Forbid this process new sockets, processes and signals, for good, by a seccomp filter.

    Raises:
        OSError: the kernel has no seccomp, or the machine's system calls are not in MACHINES.
    """
    if os.uname().machine not in MACHINES:
        raise OSError(f"the system calls of {os.uname().machine} are not known")
    architecture, clone, refused = MACHINES[os.uname().machine]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += [(AT_LEAST, 0, 1, X32), (ANSWER, 0, 0, REFUSE | EPERM)]
    for number in refused:
        lines += [(EQUAL, 0, 1, number), (ANSWER, 0, 0, REFUSE | EPERM)]
    # clone3 hides its flags behind a pointer; without it the C library takes clone, of which threads may pass.
    lines += [(EQUAL, 0, 1, CLONE3), (ANSWER, 0, 0, REFUSE | ENOSYS), (EQUAL, 1, 0, clone), (ANSWER, 0, 0, ALLOW)]
    lines += [(LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 1, 0, CLONE_THREAD), (ANSWER, 0, 0, REFUSE | EPERM)]
    lines += [(ANSWER, 0, 0, ALLOW)]
    instructions = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    program = Filter(len(lines), instructions)
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_NO_NEW_PRIVS")
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses seccomp filters")


def write_only_below(folder: str) -> bool:
    """Forbid this process to write outside a folder, for good, by Landlock; return whether the kernel can do that.

    Args:
        folder: the folder that stays writable; /dev/null does too.
    """
    version = LIBC.syscall(LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    if version < 1:
        return False
    handled = WRITE_FILE | CHANGE_FOLDER | (TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("Q", handled)
    rules = LIBC.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    for path, allowed in ((folder, handled), (os.devnull, handled & ~CHANGE_FOLDER)):
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        LIBC.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, file), 0)
        os.close(file)
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restricted = LIBC.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return restricted


def limit_resources(memory_bytes: int, file_bytes: int, cpu_s: int) -> None:
    """Limit this process' address space, file size and CPU time, and forbid core dumps.

    Args:
        memory_bytes: largest address space, in bytes.
        file_bytes: largest size of a file that it writes, in bytes.
        cpu_s: most seconds of CPU time.
    """
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def outcome_of(program: str, passed: str) -> str:
    """Run a program in this process, and return how it ended.

    Args:
        program: source code of the program.
        passed: the string to return if the program reaches its end.

    Returns:
        `passed`, or the name of the exception that ended the program, as in "AssertionError".
    """
    module = types.ModuleType("program")  # dataclasses and pickle look a class's module up
    module.__file__ = os.path.abspath("program.py")  # in whose folder tests put their files
    sys.modules[module.__name__] = module
    try:
        exec(compile(program, "program", "exec"), vars(module))
    except BaseException as error:
        return type(error).__name__
    return passed


def main() -> None:
    """Read a program from standard input, limit this process, run the program, and print its outcome as JSON."""
    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # ends with the process that started it
    task = json.load(sys.stdin)
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    limit_resources(task["memory_bytes"], task["file_bytes"], task["cpu_s"])
    files = write_only_below(os.getcwd())
    refuse_system_calls()
    outcome = outcome_of(task["program"], task["passed"])
    os.write(verdict, json.dumps({"outcome": outcome, "files": files}).encode() + b"\n")
    os._exit(0)  # past threads and exit handlers of the program


if __name__ == "__main__":
    main()
