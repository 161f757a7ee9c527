//! Failure tables, with texts to classify. Tables are written by users.

use crate::Seeds;

const OWN: &str = r#"
[[class]]
name = "license-server"
scope = "user"
severity = "sev3"
what = "the license server did not answer"
advice = "start the license server"
follows = false

[[rule]]
class = "license-server"
line = ["license * not available", "*nolicense"]
unless = ["retrying"]
source = "our library"

[[xid]]
codes = "8, 11, 39-41"
class = "license-server"
action = "none"
"#;

const NO_SUCH_CLASS: &str = r#"
[[rule]]
class = "missing"
line = ["x"]
source = ""
"#;

const TRACEBACK: &str = r#"Traceback (most recent call last):
  File "train.py", line 3, in main
    raise RuntimeError("License A not available")
RuntimeError: License A not available
[rank0]:[W1122 10:00:00] Warning: retrying
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"#;

const KERNEL_LOG: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress
Out of memory: Killed process 4242 (python) total-vm:1kB
python[991]: segfault at 0 ip 00007f error 4 in libfoo.so
";

pub fn tables() -> Seeds {
    let input = |table: &str, text: &str| [table, "\0", text].concat().into_bytes();
    vec![
        ("own", input(OWN, TRACEBACK)),
        ("numbers", input(OWN, "NVRM: Xid (PCI:0000:3b:00): 40, pid=1")),
        ("built-in", input("", TRACEBACK)),
        ("kernel-log", input("", KERNEL_LOG)),
        ("no-such-class", input(NO_SUCH_CLASS, "x")),
    ]
}
