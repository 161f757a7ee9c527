"""Plans on the command line: handwritten files, events in the cluster, and errors in one
sentence."""

from __future__ import annotations

import json

CLUSTER = """
nodes = 16
gpus_per_node = 8
peak = "312 TFLOP/s"
node_mtbf = "260d"
"""

JOB = """
[[job]]
id = "{id}"
weight = {weight}
min = {least}
nodes = {nodes}
parameters = "{size}"
regroup = "20s"
state = "10s"
lost = "40s"
[job.throughput]
1 = "1.1 PFLOP/s"
4 = "4.2 PFLOP/s"
8 = "8.0 PFLOP/s"
"""


def _files(tmp_path, cluster=CLUSTER, jobs=None):
    jobs = jobs or JOB.format(id="small", weight=1.0, least=1, nodes=8, size="7B") + JOB.format(
        id="large", weight=2.0, least=4, nodes=8, size="70B"
    )
    (tmp_path / "cluster.toml").write_text(cluster)
    (tmp_path / "jobs.toml").write_text(jobs)
    return "--cluster", str(tmp_path / "cluster.toml"), "--jobs", str(tmp_path / "jobs.toml")


def _plan(everstep, files, *more):
    done = everstep("plan", *files, "--json", *more)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return {job["job"]: job["nodes"] for job in said["jobs"]}, said


def test_a_lost_node_is_taken_from_the_job_of_less_weight(everstep, tmp_path):
    files = _files(tmp_path)
    now, said = _plan(everstep, files)
    assert (
        now == {"small": 8, "large": 8}
        and said["moved"] == []
        and said["worth"] >= max(o["worth"] for o in said["others"].values())
    )
    # node12 belongs to the large job, which is worth twice as much, so the small one gives up a
    # node.
    lost, said = _plan(everstep, files, "--event", "lose:node12")
    assert lost == {"small": 7, "large": 8} and said["moved"] == [{"node": "node7", "from": "small", "to": "large"}]
    assert said["worth"] > said["others"]["equal shares"]["worth"] and set(said["others"]) >= {"by weight", "by size"}
    done, said = _plan(everstep, files, "--event", "finish:large", "--event", "join:2")
    assert done == {"small": 8} and said["nodes"] == 18
    (tmp_path / "new.toml").write_text(JOB.format(id="new", weight=1.0, least=2, nodes=0, size="1B"))
    launched, _ = _plan(everstep, files, "--event", f"launch:{tmp_path / 'new.toml'}")
    assert launched["new"] >= 2 and sum(launched.values()) == 16
    people = everstep("plan", *files, "--event", "lose:node12").stdout
    assert (
        "8 -> 7" in people
        and "gives up 1" in people
        and "node7: from small to large" in people
        and "equal shares" in people
    )


def test_who_does_not_fit_waits_and_nobody_who_runs_starves(everstep, tmp_path):
    jobs = JOB.format(id="a", weight=0.5, least=4, nodes=4, size="7B") + JOB.format(
        id="b", weight=2.0, least=1, nodes=0, size="7B"
    )
    files = _files(tmp_path, CLUSTER.replace("16", "4"), jobs)
    assert _plan(everstep, files)[0] == {"a": 4, "b": 0}
    assert "waits: fewer than its minimum of 1 are available" in everstep("plan", *files).stdout
    assert _plan(everstep, files, "--mode", "paper")[0] == {"a": 0, "b": 4}


def test_what_cannot_be_planned_is_said_in_a_sentence(everstep, tmp_path):
    job = JOB.format(id="a", weight=1.0, least=1, nodes=1, size="7B")
    for cluster, jobs, words in [
        (CLUSTER.replace(" TFLOP/s", ""), job, "has no unit: write, for example, 312 TFLOP/s"),
        (CLUSTER.replace("260d", "-1d"), job, "is not a length of time"),
        (CLUSTER, job.replace("20s", "20"), "has no unit: write, for example, 20s"),
        (CLUSTER, job.replace("min = 1", "min = 9"), "given for 8 at most"),
        (CLUSTER, job + job, "there are two jobs a"),
        (CLUSTER.replace("16", "0"), job, "the jobs have 1 nodes, and the cluster has 0"),
        (CLUSTER, "[[jobs]]", "unknown field `jobs`"),
        (CLUSTER, job.replace("1.1 PFLOP/s", "11 PFLOP/s"), "times their peak"),
    ]:
        done = everstep("plan", *_files(tmp_path, cluster, jobs))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
    files = _files(tmp_path)
    for event, words in [
        ("lose:node99", "there is no node node99"),
        ("rain", "launch:FILE"),
        ("launch:/nowhere", "cannot read /nowhere"),
    ]:
        done = everstep("plan", *files, "--event", event)
        assert done.returncode == 2 and words in done.stderr, done.stderr


def test_jobs_are_given_by_their_models(everstep, tmp_path):
    cluster = 'nodes = 16\nhardware = "a800"\n'
    job = '[[job]]\nid = "{id}"\nmodel = "{model}"\nmin = 1\nweight = {weight}\n'
    jobs = job.format(id="small", model="gpt3-1.3b", weight=0.5) + job.format(id="large", model="gpt3-175b", weight=2.0)
    now, said = _plan(everstep, _files(tmp_path, cluster, jobs))
    # 175 B parameters do not fit on fewer than 6 nodes of 8 A800.
    assert now["small"] >= 1 and now["large"] >= 6 and said["used"] <= 16
    missing = everstep("plan", *_files(tmp_path, CLUSTER, jobs))
    assert missing.returncode == 2 and "give the cluster's hardware" in missing.stderr
    both = everstep("plan", *_files(tmp_path, cluster, jobs + '[job.throughput]\n1 = "1 PFLOP/s"\n'))
    assert both.returncode == 2 and "not both" in both.stderr
    unknown = everstep("plan", *_files(tmp_path, 'nodes = 16\nhardware = "z1"\n', jobs))
    assert unknown.returncode == 2 and "a800" in unknown.stderr


def test_small_jobs_share_a_node(everstep, tmp_path):
    small = '[[job]]\nid = "{id}"\ngpus = {gpus}\nspeed = "{speed} TFLOP/s"\nmin = 1\nweight = {weight}\n'
    jobs = "".join(
        small.format(id=name, gpus=gpus, speed=100 * gpus, weight=1.0)
        for name, gpus in (("a", 2), ("b", 4), ("c", 1), ("d", 4))
    )
    files = _files(
        tmp_path,
        "nodes = 3\n" + CLUSTER.replace("nodes = 16", ""),
        jobs + JOB.format(id="large", weight=2.0, least=1, nodes=1, size="7B"),
    )
    now, _ = _plan(everstep, files)
    assert now == {"b+d": 1, "a+c": 1, "large": 1}
    wrong = everstep("plan", *_files(tmp_path, CLUSTER, small.format(id="a", gpus=3, speed=1, weight=1.0)))
    assert wrong.returncode == 2 and "1, 2, 4" in wrong.stderr and "gpus = 3" in wrong.stderr
