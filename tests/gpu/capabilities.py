# SPDX-License-Identifier: Apache-2.0
"""Asks what this machine lets programs do, before any check: the kernel's calls and the driver's calls, each call by
itself.

GPU machines may be sandboxes, whose kernel and driver know only a part of the calls. The questions need no build. Each
answer comes from a process apart, so a process that hangs or dies costs only its own answer.
"""
import array
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import runner

_libc = ctypes.CDLL(None, use_errno=True)
SIZE = 4 << 20  # bytes of the memory that processes share here
PATTERN = 0xC0FFEE11


class No(Exception):
    """The machine does not allow the call; the text says why."""


def _checked(result, call):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def _text_of(error):
    """Formats an error: ENOSYS (38): pidfd_open: Function not implemented"""
    return f"{errno.errorcode.get(error.errno, 'error')} ({error.errno}): {error.strerror}"


@contextlib.contextmanager
def _child(work):
    """Starts a child that does `work(told)`, and yields the child's pid and the other end of the socket `told`. The
    child ends with the `with` block."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            here.close()
            runner.die_with_parent()
            work(there)
            there.recv(1)  # the child waits until the parent closes its end
        finally:
            os._exit(0)
    there.close()
    here.settimeout(60)
    try:
        yield pid, here
    finally:
        here.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


# ---- The kernel ----


def kernel():
    version = " ".join((platform.release(), platform.version()))
    buffer = ctypes.create_string_buffer(1 << 16)
    said = _libc.klogctl(3, buffer, len(buffer))  # SYSLOG_ACTION_READ_ALL
    # gVisor claims to be a Linux of 2016.
    sandbox = (said > 0 and b"gVisor" in buffer.raw[:said]) or version.startswith("4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016")
    return f"{'gVisor, which says: ' if sandbox else ''}{platform.system()} {version}"


def _open_pidfd(pid):
    return _checked(_libc.syscall(434, pid, 0), "pidfd_open")


def pidfd_open():
    os.close(_open_pidfd(os.getpid()))
    return "of the own process"


def pidfd_poll():
    with _child(lambda told: None) as (pid, _):
        pidfd = _open_pidfd(pid)
        poll = select.epoll()
        poll.register(pidfd, select.EPOLLIN)
        if poll.poll(0.05):
            raise No("a process that lives is reported as ended")
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        if not poll.poll(60):
            raise No("the end of a process is not reported within 60 s")
        poll.close()
        os.close(pidfd)
        return f"{(time.monotonic() - begin) * 1e3:.1f} ms after SIGKILL"


def _connected(what):
    """Returns the result of `what(connection)` for a connection from another process, and that process."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(folder + "/s")
        listening.listen()
        listening.settimeout(60)

        def connect(told):
            made = socket.socket(socket.AF_UNIX)
            made.connect(folder + "/s")
            told.recv(1)
        with _child(connect) as (pid, _):
            connection, _ = listening.accept()
            with connection:
                return what(connection), pid


def so_peercred():
    (pid, uid, _), wanted = _connected(
        lambda connection: struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
    if (pid, uid) != (wanted, os.getuid()):
        raise No(f"pid {pid}, uid {uid} for a process {wanted} of uid {os.getuid()}")
    return "pid and uid are right"


def so_peerpidfd():
    def ask(connection):
        os.close(struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, 77, 4))[0])
    _connected(ask)
    return "of a connection"


def _memory_file(name):
    # Python 3.8 has memfd_create(); the C libraries of sandboxes have the call, too.
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


def _send(to, message, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    to.sendmsg([json.dumps(message).encode()], rights)


def _receive(source):
    data, rights, _, _ = source.recvmsg(4096, socket.CMSG_SPACE(16 * 4))
    fds = array.array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[:len(content) - len(content) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)


def scm_rights():
    def send(told):
        fd = _memory_file("vrambroker-sent")
        os.pwrite(fd, b"sent", 0)
        _send(told, {}, [fd])
    with _child(send) as (_, here):
        _, fds = _receive(here)
        if len(fds) != 1:
            raise No(f"{len(fds)} descriptors arrived in place of one")
        with mmap.mmap(fds[0], mmap.PAGESIZE) as memory:
            if memory[:4] != b"sent":
                raise No("the memory file that arrived holds something else")
        os.close(fds[0])
    return "a memory file, which the receiver maps"


def memfd_seals():
    fd = _memory_file("vrambroker-sealed")
    try:
        fcntl.fcntl(fd, 1033, 2 | 4 | 1)  # F_ADD_SEALS: SHRINK, GROW, SEAL; Python has the names from 3.9 on
        for size in (0, 2 * mmap.PAGESIZE):
            try:
                os.ftruncate(fd, size)
            except PermissionError:
                continue
            raise No("a sealed file changes its size")
    finally:
        os.close(fd)
    return "against another size"


def proc_fd():
    """Looks into a child: a program's view into another process also depends on the program's rights."""
    def hold(told):
        fd = _memory_file("vrambroker-held")
        _send(told, {"fd": fd, "inode": os.fstat(fd).st_ino})
    with _child(hold) as (pid, here):
        held, _ = _receive(here)
        path = f"/proc/{pid}/fd/{held['fd']}"
        name, inode = os.readlink(path), os.stat(path).st_ino
        if "vrambroker-held" not in name or inode != held["inode"]:
            raise No(f"names {name}, inode {inode}, for memfd:vrambroker-held, inode {held['inode']}")
        with open(f"/proc/{pid}/fdinfo/{held['fd']}", encoding="utf-8") as info:
            with_inode = "ino:" in info.read()
    return f"name and inode of a child's descriptor; fdinfo has {'the inode' if with_inode else 'no inode'}"


def pdeathsig():
    def between(told):
        with _child(lambda _: None) as (pid, _):
            told.send(str(pid).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    with _child(between) as (_, here):
        pid = int(here.recv(32))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                os.kill(pid, 0)
                with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                    if stat.read().rsplit(")", 1)[1].split()[0] in "ZX":
                        return "a child ends with its parent"
            except (ProcessLookupError, FileNotFoundError):
                return "a child ends with its parent"
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
    raise No("a child lives on 60 s after its parent's SIGKILL")


# ---- The driver: a process that shares memory, and a process that opens the memory ----


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Place(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("place", _Place), ("windows", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]


class _Access(ctypes.Structure):
    _fields_ = [("place", _Place), ("flags", ctypes.c_int)]


_POSIX_FD, _DEVICE, _PINNED, _READ_WRITE = 1, 1, 1, 3


class Driver:
    """Wraps libcuda, with a context on the first GPU that this process sees."""

    def __init__(self):
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise No(f"no driver: {error}") from None
        begin = time.monotonic()
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)
        self.seconds = time.monotonic() - begin

    def __call__(self, call, *arguments):
        try:
            function = getattr(self._lib, call)
        except AttributeError:
            raise No(f"{call}: this driver has no such function") from None
        code = function(*arguments)
        if code != 0:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(name))
            raise No(f"{(name.value or b'error').decode()} ({code}): {call}")

    def fill(self, address):
        self("cuMemsetD32_v2", address, ctypes.c_uint(PATTERN), ctypes.c_size_t(SIZE // 4))
        self("cuCtxSynchronize")

    def check(self, address):
        seen = (ctypes.c_uint * 1024)()
        self("cuMemcpyDtoH_v2", seen, address, ctypes.c_size_t(ctypes.sizeof(seen)))
        if set(seen) != {PATTERN}:
            raise No("the memory can be opened, but holds something else")

    def map(self, allocation):
        """Maps an allocation, and returns its address."""
        address, size = ctypes.c_ulonglong(), ctypes.c_size_t(SIZE)
        self("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0),
             ctypes.c_ulonglong(0))
        self("cuMemMap", address, size, ctypes.c_size_t(0), allocation, ctypes.c_ulonglong(0))
        access = _Access(_Place(_DEVICE, 0), _READ_WRITE)
        self("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address

    # ---- Calls of the opening process ----

    def open_ipc(self, message, _):
        handle = _IpcHandle.from_buffer_copy(bytes.fromhex(message["handle"]))
        address = ctypes.c_ulonglong()
        self("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(1))
        self.check(address)
        self("cuIpcCloseMemHandle", address)

    def open_fd(self, _, fds):
        if len(fds) != 1:
            raise No(f"{len(fds)} descriptors arrived in place of one: SCM_RIGHTS does not pass the driver's")
        allocation = ctypes.c_ulonglong()
        self("cuMemImportFromShareableHandle", ctypes.byref(allocation), ctypes.c_void_p(fds[0]), _POSIX_FD)
        self.check(self.map(allocation))


def _open_shared(fd):
    """Runs the other process, which opens the shared memory."""
    told = socket.socket(fileno=fd)
    driver = None
    while True:
        message, fds = _receive(told)
        if message is None:
            return
        try:
            driver = driver or Driver()
            getattr(driver, message["do"])(message, fds)
            _send(told, {"no": ""})
        except No as no:
            _send(told, {"no": str(no)})


class _Cuda:
    """Holds this process's context and the other process; the first question starts both."""

    def __init__(self):
        self._start_other()
        self.driver = Driver()

    def _start_other(self):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._other = subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__), "--open", str(there.fileno())],
                                       pass_fds=[there.fileno()], stdin=subprocess.DEVNULL,
                                       preexec_fn=runner.die_with_parent)
        there.close()
        self._socket = here

    def opened(self, message, fds=()):
        _send(self._socket, message, fds)
        answer, _ = _receive(self._socket)
        if answer is None:
            code = self._other.wait()
            self._start_other()  # a new process for the next question
            raise No(f"the process that opens it has ended: exit code {code}")
        if answer["no"]:
            raise No(f"in the second process: {answer['no']}")


_cuda = []


def _ask_cuda():
    if not _cuda:
        _cuda.append(_Cuda())
    return _cuda[0]


def cuda_context():
    return f"{_ask_cuda().driver.seconds:.2f} s for the first one"


def nvidia_files():
    """Lists the device files that a daemon looks for when it searches processes with GPU memory."""
    _ask_cuda()
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = sorted(name for name in names if name.startswith("/dev/nvidia"))
    if not found:
        raise No("a process that uses the GPU has no /dev/nvidia* open")
    return " ".join(found)


def cuda_ipc():
    cuda, address, handle = _ask_cuda(), ctypes.c_ulonglong(), _IpcHandle()
    cuda.driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(SIZE))
    try:
        cuda.driver.fill(address)
        cuda.driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
        cuda.opened({"do": "open_ipc", "handle": bytes(handle).hex()})
    finally:
        cuda.driver("cuMemFree_v2", address)
    return "a second process opens and reads a handle"


def cuda_vmm_fd():
    cuda, allocation, fd = _ask_cuda(), ctypes.c_ulonglong(), ctypes.c_int(-1)
    properties = _Properties(_PINNED, _POSIX_FD, _Place(_DEVICE, 0))
    cuda.driver("cuMemCreate", ctypes.byref(allocation), ctypes.c_size_t(SIZE), ctypes.byref(properties),
                ctypes.c_ulonglong(0))
    cuda.driver("cuMemExportToShareableHandle", ctypes.byref(fd), allocation, _POSIX_FD, ctypes.c_ulonglong(0))
    try:
        cuda.driver.fill(cuda.driver.map(allocation))
        cuda.opened({"do": "open_fd"}, [fd.value])
    finally:
        os.close(fd.value)
    return "a second process imports and reads a descriptor of cuMemCreate's memory"


def nvml():
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise No(f"no NVML: {error}") from None
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    for call, *arguments in (("nvmlInit_v2",), ("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(device)),
                             ("nvmlDeviceGetMemoryInfo", device, memory)):
        code = getattr(lib, call)(*arguments)
        if code != 0:
            raise No(f"NVML error {code}: {call}")
    return f"{memory[1] >> 20} MiB of {memory[0] >> 20} MiB are free"


KERNEL = {f.__name__: f for f in (kernel, pidfd_open, pidfd_poll, so_peercred, so_peerpidfd, scm_rights, memfd_seals, proc_fd,
                                  pdeathsig)}
CUDA = {f.__name__: f for f in (cuda_context, nvidia_files, cuda_ipc, cuda_vmm_fd, nvml)}
PATIENCE = dict.fromkeys((*KERNEL, *CUDA), 150.0)  # seconds for an answer: more than any question waits by itself


def answer(name):
    """Returns {"name", "allowed", "detail"} for this machine, from this process."""
    begin = time.monotonic()
    try:
        allowed, detail = True, {**KERNEL, **CUDA}[name]()
    except No as no:
        allowed, detail = False, str(no)
    except OSError as error:
        allowed, detail = False, _text_of(error) if error.errno else str(error)
    except Exception as error:  # a sandbox may raise any error in place of an answer
        allowed, detail = False, f"{type(error).__name__}: {error}"
    return {"name": name, "allowed": allowed, "detail": detail, "seconds": round(time.monotonic() - begin, 3)}


def _answers(names, told):
    """Asks the questions in sequence in a single process, which may end before the last answer. `told` gets each
    answer."""
    with subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__), "--answer", *names], stdout=subprocess.PIPE,
                          stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=runner.die_with_parent) as process:
        said, why = b"", ""
        while len(said.splitlines()) < len(names) or not said.endswith(b"\n"):
            name = names[said.count(b"\n")]
            if not select.select([process.stdout], [], [], PATIENCE[name])[0]:
                why = f"no answer within {PATIENCE[name]:.0f} s"
                break
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                break
            said += piece
        found = [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
        stuck = runner.end(process) if why else ""
        if not why and len(found) < len(names):
            code = process.wait()
            why = f"the process that asked {f'died by signal {-code}' if code < 0 else f'ended with exit code {code}'}"
        if stuck:
            process.returncode = 0  # no caller waits for the stuck process
    for each in found:
        told(each)
    if why:
        found.append({"name": names[len(found)], "allowed": False, "detail": f"{why}{'; ' if stuck else ''}{stuck}"})
        told(found[-1])
    return found


def ask(cuda, told=lambda answer: None, answers=_answers):
    """Returns all answers, by name. `cuda`: asks the driver as well."""
    found = {}
    for group in (KERNEL, CUDA) if cuda else (KERNEL,):
        left = list(group)
        while left:
            for each in answers(left, told):
                found[each["name"]] = each
                left.remove(each["name"])
    return found


def missing(found, needs):
    """Returns why a step with these needs cannot run, or ""; an unasked need counts as allowed."""
    return "; ".join(f"needs {name}, which this machine does not allow: {found[name]['detail']}"
                     for name in needs if name in found and not found[name]["allowed"])


def say(each):
    print(f"{'allows' if each['allowed'] else 'LACKS':7}  {each['name']:44} {'':>7}  {each['detail']}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--open":
        _open_shared(int(sys.argv[2]))
    elif sys.argv[1] == "--answer":
        for asked in sys.argv[2:]:
            print(json.dumps(answer(asked)), flush=True)
        os._exit(0)  # the driver's exit handlers may fail
    else:
        ask(True, say)
