"""Runs a program for which some system calls fail, as on a network file system or an older kernel.

For x86-64. ``denied.py CALL=ERROR[@ARGUMENT&MASK] … -- PROGRAM …``: ``renameat2=EINVAL@4&15``
denies it with any flag.
"""

import ctypes
import errno
import os
import re
import struct
import sys

NUMBERS = {
    "open": 2, "access": 21, "madvise": 28, "link": 86, "sched_setaffinity": 203, "inotify_add_watch": 254, "openat": 257, "linkat": 265,
    "fallocate": 285, "inotify_init1": 294, "process_vm_readv": 310,
    "renameat2": 316, "memfd_create": 319, "copy_file_range": 326, "statx": 332,
    "pidfd_send_signal": 424, "clone3": 435, "pidfd_open": 434,
    "close_range": 436, "openat2": 437, "mlock": 149, "ptrace": 101, "flock": 73,
}  # fmt: skip
LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2


def program(rules: list[str]) -> bytes:
    """Returns the filter."""
    code = [(LOAD, 0, 0, 0)]
    for rule in rules:
        name, error, argument, mask = re.fullmatch(r"(\w+)=(\w+)(?:@(\d)&(\w+))?", rule).groups()  # type: ignore[union-attr]
        failed = (RETURN, 0, 0, ERROR | getattr(errno, error))
        if argument is None:
            code += [(JUMP_EQUAL, 0, 1, NUMBERS[name]), failed]
        else:
            code += [
                (JUMP_EQUAL, 0, 4, NUMBERS[name]),
                (LOAD, 0, 0, 16 + 8 * int(argument)),
                (JUMP_SET, 0, 1, int(mask, 0)),
                failed,
                (LOAD, 0, 0, 0),
            ]
    return b"".join(struct.pack("HBBI", *line) for line in [*code, (RETURN, 0, 0, ALLOW)])


def main() -> None:
    split = sys.argv.index("--")
    text = program(sys.argv[1:split])
    held = ctypes.create_string_buffer(text)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(text) // 8, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])


main()
