"""The fake CANN runtime itself: every rule that it is there to enforce, broken once."""

import ctypes as C
import os
import subprocess
import sys
import threading

import pytest
import torch

import fake
from fake import H2D, D2H, acl, check, nn, pointer, size_t


def text():
    return acl.aclGetRecentErrMsg().decode()


def test_device_and_context_belong_to_the_thread():
    device, seen = C.c_int32(-1), []
    check(acl.aclrtSetDevice(3))
    check(acl.aclrtGetDevice(C.byref(device)))
    assert device.value == 3

    def other():
        seen.append((acl.aclrtGetDevice(C.byref(device)), text()))
        p = pointer()
        seen.append((acl.aclrtMalloc(C.byref(p), size_t(32), 0), text()))

    t = threading.Thread(target=other)
    t.start()
    t.join()
    assert [s for s, _ in seen] == [107002, 107002] and "no context" in seen[0][1]
    assert text() == ""  # the other thread's
    assert acl.aclrtSetDevice(8) == 107001 and acl.aclrtSetDevice(-1) == 107001


def test_error_text_is_given_once():
    assert acl.aclrtSetDevice(99) == 107001
    assert "99" in text() and text() == ""


def test_host_code_that_touches_device_memory_dies():
    code = """
import fake
fake.start(0)
p = fake.malloc(64)
fake.C.string_at(p, 1)
"""
    here = os.path.dirname(os.path.abspath(fake.__file__))
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == -11, (done.returncode, done.stderr)


def test_memory_is_checked_on_every_access(expected):
    p, host = fake.malloc(100), C.create_string_buffer(4096)
    assert acl.aclrtMemcpy(p, size_t(101), host, size_t(101), H2D) == 107000 and "beyond" in text()
    assert acl.aclrtMemcpy(p, size_t(50), host, size_t(100), H2D) == 107000 and "fit" in text()
    assert acl.aclrtMemcpy(host, size_t(100), host, size_t(100), H2D) == 107000 and "not device memory" in text()
    assert acl.aclrtMemcpy(p, size_t(100), host, size_t(100), D2H) == 107000 and "is device memory" in text()
    assert acl.aclrtMemcpy(host, size_t(100), p, size_t(100), 0) == 107000 and "is device memory" in text()
    check(acl.aclrtMemcpy(host, size_t(100), p, size_t(100), D2H))
    assert host.raw[:100] == b"\xff" * 100  # new memory is NaN
    check(acl.aclrtMemcpy(p, size_t(100), host, size_t(100), H2D))
    fake.free(p)
    assert acl.aclrtMemcpy(p, size_t(100), host, size_t(100), H2D) == 107000 and "no live allocation" in text()
    assert not expected()
    assert acl.aclrtFree(p) == 107000
    assert "not the start" in expected()[0]
    left, total = size_t(), size_t()
    check(acl.aclrtGetMemInfo(0, C.byref(left), C.byref(total)))
    assert acl.aclrtMalloc(C.byref(p), size_t(total.value + 1), 0) == 207001 and "out of memory" in text()


def test_pointer_attributes():
    words = (C.c_uint32 * 7)()
    check(acl.aclrtSetDevice(2))
    p, h, plain = fake.malloc(100), pointer(), C.create_string_buffer(8)
    check(acl.aclrtMallocHost(C.byref(h), size_t(100)))
    for address, expect in (p, (2, 1)), (h, (0, 0)), (plain, (0, 2)):
        check(acl.aclrtPointerGetAttributes(address, words))
        assert (words[0], words[1]) == expect
    fake.free(p)
    check(acl.aclrtFreeHost(h))


def test_streams_run_later_and_in_order():
    s, p, pinned = fake.new_stream(), fake.malloc(4), pointer()
    check(acl.aclrtMallocHost(C.byref(pinned), size_t(4)))
    C.memset(pinned, 0, 4)
    acl.gdnfake_hold(1)
    for value in 1, 2, 3:
        check(acl.aclrtMemsetAsync(p, size_t(4), value, size_t(4), s))
    check(acl.aclrtMemcpyAsync(pinned, size_t(4), p, size_t(4), D2H, s))
    ready = C.c_int(-1)
    check(acl.aclrtStreamQuery(s, C.byref(ready)))
    assert ready.value == 1 and C.string_at(pinned, 4) == b"\0" * 4  # nothing has run
    check(acl.aclrtSynchronizeStream(s))
    assert C.string_at(pinned, 4) == b"\3" * 4
    check(acl.aclrtStreamQuery(s, C.byref(ready)))
    assert ready.value == 0
    check(acl.aclrtDestroyStream(s))
    fake.free(p)
    check(acl.aclrtFreeHost(pinned))


def test_unordered_accesses_are_found_whatever_the_timing(expected):
    a, b, p, e = fake.new_stream(), fake.new_stream(), fake.malloc(64), fake.new_event()
    write = lambda s: check(acl.aclrtMemsetAsync(p, size_t(64), 0, size_t(64), s))
    write(a)
    write(a)  # one stream orders its own work
    check(acl.aclrtRecordEvent(e, a))
    check(acl.aclrtStreamWaitEvent(b, e))
    write(b)  # an event orders two streams
    assert not expected()
    write(a)  # nothing orders this after b's
    assert "nothing orders" in expected()[0]
    check(acl.aclrtSynchronizeStream(a))
    check(acl.aclrtSynchronizeStream(b))
    write(a)  # the host has waited
    assert not expected()
    host = C.create_string_buffer(64)
    check(acl.aclrtMemcpy(host, size_t(64), p, size_t(64), D2H))  # it has not
    assert "nothing orders" in expected()[0]
    fake.free(p)
    assert "aclrtFree" in expected()[0]
    check(acl.aclrtSynchronizeStream(a))
    for s in a, b:
        check(acl.aclrtDestroyStream(s))
    check(acl.aclrtDestroyEvent(e))


def test_streams_belong_to_their_context():
    s = fake.new_stream()
    p = fake.malloc(4)
    check(acl.aclrtSetDevice(1))
    assert acl.aclrtMemsetAsync(p, size_t(4), 0, size_t(4), s) == 107000 and "device 0" in text()
    assert acl.aclrtSynchronizeStream(s) == 107003 and "device 0" in text()
    check(acl.aclrtSetDevice(0))
    check(acl.aclrtDestroyStream(s))
    fake.free(p)


def test_dead_handles_are_known(expected):
    s, e = fake.new_stream(), fake.new_event()
    check(acl.aclrtDestroyStream(s))
    check(acl.aclrtDestroyEvent(e))
    assert acl.aclrtSynchronizeStream(s) == 107017 and "already destroyed" in text()
    assert acl.aclrtRecordEvent(e, None) == 107017
    assert acl.aclrtRecordEvent(C.create_string_buffer(64), None) == 107017
    assert not expected()
    assert acl.aclrtDestroyEvent(e) == 107017
    t = fake.descriptor(torch.zeros(4), fake.malloc(16))
    check(nn.aclDestroyTensor(t))
    assert nn.aclDestroyTensor(t) == 107017
    assert len(expected()) == 2


def test_destroying_a_busy_stream_is_a_violation(expected):
    s, p = fake.new_stream(), fake.malloc(4)
    check(acl.aclrtMemsetAsync(p, size_t(4), 0, size_t(4), s))
    check(acl.aclrtDestroyStream(s))
    assert "not synchronized" in expected()[0]
    check(acl.aclrtSynchronizeDevice())
    fake.free(p)


def test_events_carry_times_and_status():
    a, b, s, status = fake.new_event(), fake.new_event(), fake.new_stream(), C.c_int(-1)
    check(acl.aclrtQueryEventStatus(a, C.byref(status)))
    assert status.value == 1
    acl.gdnfake_hold(1)
    check(acl.aclrtRecordEvent(a, s))
    check(acl.aclrtQueryEventStatus(a, C.byref(status)))
    assert status.value == 0
    ms = C.c_float()
    check(acl.aclrtRecordEvent(b, s))
    assert acl.aclrtEventElapsedTime(C.byref(ms), a, b) == 107000
    check(acl.aclrtSynchronizeEvent(b))
    check(acl.aclrtEventElapsedTime(C.byref(ms), a, b))
    assert 0 <= ms.value < 60000
    for e in a, b:
        check(acl.aclrtDestroyEvent(e))
    check(acl.aclrtDestroyStream(s)) if not acl.aclrtSynchronizeStream(s) else None


def test_scripted_failures():
    acl.gdnfake_fail(b"aclrtMalloc", 2, 207001, b"no memory, as scripted")
    fake.free(fake.malloc(32))
    with pytest.raises(fake.Error, match="207001: no memory, as scripted"):
        fake.malloc(32)
    fake.free(fake.malloc(32))
    acl.gdnfake_fail(b"*", 1, 500000, b"anything")
    with pytest.raises(fake.Error, match="anything"):
        fake.new_stream()
    assert acl.gdnfake_pending_failures() == 0


def test_work_that_fails_reports_at_the_next_synchronization():
    s, p = fake.new_stream(), fake.malloc(4)
    for stop in 0, 1:
        check(acl.aclrtMemsetAsync(p, size_t(4), 7, size_t(4), s))
        check(acl.aclrtSynchronizeStream(s))
        check(acl.aclrtSetStreamFailureMode(s, C.c_uint64(stop)))
        acl.gdnfake_fail(b"run:aclrtMemsetAsync", 1, 507015, b"AI core exception")
        check(acl.aclrtMemsetAsync(p, size_t(4), 8, size_t(4), s))
        check(acl.aclrtMemsetAsync(p, size_t(4), 9, size_t(4), s))
        assert acl.aclrtSynchronizeStream(s) == 507015 and "AI core exception" in text()
        host = C.create_string_buffer(4)
        check(acl.aclrtMemcpy(host, size_t(4), p, size_t(4), D2H))
        assert host.raw == (b"\7" if stop else b"\11") * 4
        if not stop:
            check(acl.aclrtSynchronizeStream(s))  # told once
    assert acl.aclrtSynchronizeStream(s) == 507015  # a stopped stream stays so
    fake.free(p)
    check(acl.aclrtDestroyStream(s))


def test_descriptors_are_checked():
    p = fake.malloc(4096)
    made = []

    def refused(shape, strides, offset, form, storage, at=None, dtype=0):
        t = nn.aclCreateTensor(fake.ints(shape), C.c_uint64(len(shape)), dtype, fake.ints(strides), C.c_int64(offset), form, fake.ints(storage),
                               C.c_uint64(len(storage)), p if at is None else pointer(at))
        if t:
            made.append(pointer(t))
            return None
        return text()

    assert refused([4, 4], [4, 1], 0, 2, [16]) is None
    assert refused([4, 4], [4, 1], 4, 2, [20]) is None
    assert "do not lie" in refused([4, 4], [4, 1], 4, 2, [16])
    assert "do not lie" in refused([4, 4], [4, 1], -1, 2, [16])
    assert "format" in refused([4, 4], [4, 1], 0, 29, [16])
    assert "stride" in refused([4], [-1], 0, 2, [16])
    assert "multiple of 32" in refused([4], [1], 0, 2, [16], at=p.value + 4)
    assert "null" in refused([4], [1], 0, 2, [16], at=0)
    assert "data type" in refused([4], [1], 0, 2, [16], dtype=5)
    for t in made:
        check(nn.aclDestroyTensor(t))
    fake.free(p)


ADD = "TTcT"


def test_two_phases_and_what_can_go_wrong_between_them(expected):
    x, y, z = torch.arange(6.0).view(2, 3), torch.ones(3), torch.empty(2, 3)
    fake.call(fake.opapi, "Add", ADD, [x, y, 2.0, z])
    assert z.equal(x + 2)
    with pytest.raises(fake.Error, match="161001"):
        fake.call(fake.opapi, "Add", ADD, [x, None, 2.0, z])
    with pytest.raises(fake.Error, match="161002.*size 4"):
        fake.call(fake.opapi, "Add", ADD, [x, torch.ones(4), 2.0, z])

    p = fake.malloc(64)
    t = fake.descriptor(torch.zeros(4), p)
    n, executor = C.c_uint64(), pointer()
    check(fake.opapi.aclnnInplaceOneGetWorkspaceSize(t, C.byref(n), C.byref(executor)))
    check(nn.aclDestroyTensor(t))
    assert fake.opapi.aclnnInplaceOne(None, n, executor, None) == 161002
    assert "between the two phases" in expected()[0]

    t = fake.descriptor(torch.zeros(4), p)
    check(fake.opapi.aclnnInplaceOneGetWorkspaceSize(t, C.byref(n), C.byref(executor)))
    assert fake.opapi.aclnnInplaceZero(None, n, executor, None) == 561101  # another operator's
    check(fake.opapi.aclnnInplaceOne(None, n, executor, None))
    assert fake.opapi.aclnnInplaceOne(None, n, executor, None) == 561101  # used up
    assert len(expected()) == 2
    check(acl.aclrtSynchronizeStream(None))

    check(fake.opapi.aclnnInplaceOneGetWorkspaceSize(t, C.byref(n), C.byref(executor)))
    check(nn.aclSetAclOpExecutorRepeatable(executor))
    for _ in range(3):
        check(fake.opapi.aclnnInplaceOne(None, n, executor, None))
    check(acl.aclrtSynchronizeStream(None))
    check(nn.aclDestroyAclOpExecutor(executor))
    check(nn.aclDestroyTensor(t))

    host = torch.zeros(8)  # 32-byte aligned or not: host memory is refused when the work is put on the stream
    at = pointer((host.data_ptr() + 31) // 32 * 32)
    t = fake.descriptor(torch.zeros(1), at)
    check(fake.opapi.aclnnInplaceOneGetWorkspaceSize(t, C.byref(n), C.byref(executor)))
    assert fake.opapi.aclnnInplaceOne(None, n, executor, None) == 361001 and "not device memory" in text()
    check(nn.aclDestroyTensor(t))
    fake.free(p)


def test_workspace_is_watched(expected):
    letters = fake.declared()["ChunkLocalCumsum"]
    g, y = torch.rand(1, 1, 64), torch.empty(1, 1, 64)
    args = [g, None, None, 64, False, 1.0, True, "float32", y]
    fake.call(fake.fla, "ChunkLocalCumsum", letters, args)
    torch.testing.assert_close(y, g.cumsum(-1))
    # Released before the stream has passed: found whatever the timing.
    m = [fake.Memory(g), fake.Memory(y)]
    t = [fake.descriptor(g, m[0].p), fake.descriptor(y, m[1].p)]
    n, executor = C.c_uint64(), pointer()
    check(fake.fla.aclnnChunkLocalCumsumGetWorkspaceSize(t[0], None, None, C.c_int64(64), C.c_bool(False), C.c_double(1), C.c_bool(True), b"float32", t[1],
                                                         C.byref(n), C.byref(executor)))
    assert n.value > 0
    w = fake.malloc(n.value)
    check(fake.fla.aclnnChunkLocalCumsum(w, n, executor, None))
    fake.free(w)
    check(acl.aclrtSynchronizeStream(None))
    assert "aclrtFree" in expected()[0]
    for d in t:
        check(nn.aclDestroyTensor(d))
    for x in m:
        fake.free(x.p)


def test_threads():
    """Eight threads, a stream each, no lock of ours around anything."""
    failures = []

    def worker(i):
        try:
            check(acl.aclrtSetDevice(i % 2))
            s = fake.new_stream()
            for n in range(50):
                x, z = torch.full((33,), float(i)), torch.empty(33)
                fake.call(fake.opapi, "Add", ADD, [x, x, float(n), z], stream=s)
                assert z.equal(x + n * x)
            check(acl.aclrtDestroyStream(s))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_kernels_of_a_vendor_are_found_by_the_environment(monkeypatch):
    """Symbols resolve all the same."""
    t = fake.descriptor(torch.zeros(1, 1, 64), fake.malloc(256))
    n, executor = C.c_uint64(), pointer()
    first = lambda: fake.fla.aclnnChunkLocalCumsumGetWorkspaceSize(t, None, None, C.c_int64(64), C.c_bool(False), C.c_double(1), C.c_bool(True), b"float32", t,
                                                                   C.byref(n), C.byref(executor))
    for value in "", "/somewhere", str(fake.VENDOR):
        monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", value)
        assert first() == 561003 and "ASCEND_CUSTOM_OPP_PATH" in text()
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"/somewhere:{fake.VENDOR.parent}:")
    check(first())
    check(nn.aclDestroyAclOpExecutor(executor))
    check(nn.aclDestroyTensor(t))


def test_what_old_releases_lack():
    """Which symbols are there decides what a client does."""
    new, old = (C.CDLL(str(fake.CANN.parent / f / "lib64/libopapi.so")) for f in ("cann", "cann-old"))
    assert hasattr(new, "aclnnChunkGatedDeltaRule") and not hasattr(old, "aclnnChunkGatedDeltaRule")
    assert hasattr(new, "aclnnRecurrentGatedDeltaRule") and hasattr(old, "aclnnRecurrentGatedDeltaRule")
    assert not (fake.CANN.parent / "cann-old/lib64/libacl_rtc.so").exists()


def test_the_compiler_refuses_and_says_why(expected):
    rtc = C.CDLL(str(fake.CANN / "lib64/libacl_rtc.so"))
    program, n = pointer(), size_t()
    check(rtc.aclrtcCreateProg(C.byref(program), b"source", b"name", 0, None, None))
    assert rtc.aclrtcCompileProg(program, 0, None) == 107000 and "--npu-arch" in text()
    assert rtc.aclrtcCompileProg(program, 1, (C.c_char_p * 1)(b"--npu-arch=dav-2201")) == 500000
    check(rtc.aclrtcGetCompileLogSize(program, C.byref(n)))
    log = C.create_string_buffer(n.value)
    check(rtc.aclrtcGetCompileLog(program, log))
    assert b"no compiler" in log.value and acl.gdnfake_live(b"program") == 1
    dead = pointer(program.value)
    check(rtc.aclrtcDestroyProg(C.byref(program)))
    assert not program.value and rtc.aclrtcDestroyProg(C.byref(dead)) == 107017 and expected()


def test_time_spent_inside_is_counted():
    before = acl.gdnfake_ns()
    fake.free(fake.malloc(1 << 24))
    assert acl.gdnfake_ns() > before + 100_000  # it writes 16 MiB
