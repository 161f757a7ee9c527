"""The process-group store speaks torch's protocol: the same calls give the same answers."""

from __future__ import annotations

import json

CALLS = """
import datetime, json, os, sys
import torch.distributed as dist

def play(s):
    s.set("a", "1"); s.append("a", "2"); s.append("new", "x")
    out = [s.get("a"), s.get("new"), s.add("n", 5), s.add("n", -2), s.get("n"), s.check(["a", "n"]), s.check(["a", "zz"])]
    out += [s.compare_set("c", "", "first"), s.compare_set("c", "wrong", "x"), s.compare_set("c", "first", "second")]
    s.multi_set(["m1", "m2"], ["v1", "v2"])
    out += [s.multi_get(["m1", "m2"]), s.delete_key("m1"), s.delete_key("m1"), s.check(["m1"])]
    out += [s.get("c"), s.set("big", "z" * 300000), len(s.get("big"))]
    try:
        s.wait(["never"], datetime.timedelta(milliseconds=300)); out.append("?")
    except Exception as e:
        out.append(type(e).__name__)
    out.append(s.get("a"))
    if hasattr(s, "queue_push"):
        s.queue_push("q", "one"); s.queue_push("q", "two")
        out += [s.queue_len("q"), s.queue_pop("q"), s.queue_pop("q"), s.queue_len("q")]
    before = s.num_keys(); s.set("one-more", "x"); out.append(s.num_keys() - before)
    return [
        o.decode() if isinstance(o, bytes)
        else [x.decode() if isinstance(x, bytes) else x for x in o] if isinstance(o, list)
        else o
        for o in out
    ]

timeout = datetime.timedelta(seconds=20)
ours = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, False, timeout)
real = dist.TCPStore("127.0.0.1", 0, 1, True, timeout, multi_tenant=False)
print(json.dumps([play(ours), play(real)]))
"""


def test_the_same_answers_as_torchs_own_server(everstep, script):
    done = everstep("run", "--standalone", script(CALLS))
    assert done.returncode == 0, done.stderr
    ours, real = json.loads(done.stdout)
    assert ours == real and len(ours) > 20


def test_a_restart_sees_no_key_of_the_generation_before(everstep, script):
    text = """
import datetime, os
import torch.distributed as dist
s = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, False, datetime.timedelta(seconds=20))
print("stale" if s.check(["mark"]) else "clean", flush=True)
s.set("mark", "x"); s.get("mark")
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2": os.kill(os.getpid(), 9)
"""
    done = everstep("run", "--standalone", "--max-restarts", "2", script(text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["clean"] * 3
