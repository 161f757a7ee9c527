//! Real error texts, and their classes by the built-in table. The rules were written on these
//! texts; `figures/error_classifier.py` also checks texts that the rules have not seen.

use everstep_core::severity::{Class, Scope, Severity, Table, TableError};
use serde::Deserialize;

const PYTORCH_STACK: &str = include_str!("../errors/pytorch_stack.toml");
const TRAINING_FRAMEWORKS: &str = include_str!("../errors/training_frameworks.toml");

#[derive(Deserialize)]
struct Texts {
    text: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    class: String,
    /// Other classes that a person might well choose.
    #[serde(default)]
    or: Vec<String>,
    source: String,
    text: String,
}

fn read(written: &str) -> Vec<Text> {
    toml::from_str::<Texts>(written).unwrap().text
}

/// Returns the texts whose class differs from the one that a person chose.
fn wrong(texts: &[Text]) -> Vec<String> {
    let said = |t: &Text| Table::built_in().classify(&t.text).map_or("nothing", |f| f.class.name.as_str());
    let all = texts.iter().filter(|t| said(t) != t.class && !t.or.iter().any(|o| o == said(t)));
    all.map(|t| format!("{} is called {}: {} ({})", t.class, said(t), t.text.trim(), t.source)).collect()
}

#[test]
fn the_table_is_whole() {
    let table = Table::built_in();
    assert!(table.classes.len() > 30 && table.rules.len() > 30);
    for text in [PYTORCH_STACK, TRAINING_FRAMEWORKS].into_iter().flat_map(read) {
        assert!(!text.source.is_empty());
        for class in std::iter::once(&text.class).chain(&text.or) {
            assert!(table.class(class).is_some(), "{class}");
        }
    }
}

#[test]
fn texts_that_the_rules_were_written_on() {
    let texts: Vec<Text> = [PYTORCH_STACK, TRAINING_FRAMEWORKS].into_iter().flat_map(read).collect();
    assert!(texts.len() >= 240);
    let wrong = wrong(&texts);
    assert!(wrong.len() * 20 <= texts.len(), "{} of {} are wrong:\n{}", wrong.len(), texts.len(), wrong.join("\n"));
}

#[test]
fn a_cause_is_found_above_what_it_brings_about() {
    let text = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n\
                [rank3]: NCCL communicator was aborted on rank 3.\n\
                terminate called after throwing an instance of 'c10::DistBackendError'";
    let found = Table::built_in().classify(text).unwrap();
    assert_eq!(
        (found.class.name.as_str(), found.class.severity, found.class.scope),
        ("gpu-memory", Severity::Sev1, Scope::Node)
    );
    assert_eq!(found.line, "RuntimeError: CUDA error: uncorrectable ECC error encountered");
    assert!(Table::built_in().classify("step 100 loss 2.31").is_none());
}

#[test]
fn a_warning_is_asked_last() {
    let text = "/usr/lib/x.py:12: UserWarning: CUDA initialization: no CUDA-capable device is detected\n\
                [rank1]:[W1122 03:10:04.512 socket.cpp:460] connection reset\n\
                KeyError: 'lr'";
    let class = |text| Table::built_in().classify(text).map(|f| f.class.name.as_str());
    assert_eq!(class(text), Some("script-error"));
    assert_eq!(class(text.rsplit_once('\n').unwrap().0), Some("gpu-lost"));
}

#[test]
fn lines_of_the_program_are_not_what_happened() {
    let text = "Traceback (most recent call last):\n\
                [rank0]:   File \"/data/train.py\", line 3, in main\n\
                [rank0]:     raise FileNotFoundError(\"no such file\") if timed_out else error\n\
                [rank0]: ValueError: seven";
    let found = Table::built_in().classify(text).unwrap();
    assert_eq!((found.class.name.as_str(), found.line), ("script-error", "[rank0]: ValueError: seven"));
}

#[test]
fn a_users_rows_come_first() {
    let own = r#"
        [[class]]
        name = "tokenizer-service"
        scope = "storage"
        severity = "sev3"
        what = "the tokenizer service does not answer"
        advice = "call the data team"
        [[rule]]
        class = "tokenizer-service"
        line = ["tokend: * unavailable"]
        source = "our own service"
    "#;
    let table = Table::built_in().with(own).unwrap();
    let text = "ValueError: tokend: shard 3 unavailable";
    assert_eq!(table.classify(text).map(|f| &f.class.name[..]), Some("tokenizer-service"));
    assert_eq!(Table::built_in().classify(text).map(|f| &f.class.name[..]), Some("connection-refused"));
    let again = Table::built_in()
        .with("[[class]]\nname = \"gpu-lost\"\nscope = \"node\"\nseverity = \"sev2\"\nwhat = \"w\"\nadvice = \"a\"")
        .unwrap();
    let classes: Vec<&Class> = again.classes.iter().filter(|c| c.name == "gpu-lost").collect();
    assert_eq!(classes.iter().map(|c| c.severity).collect::<Vec<_>>(), [Severity::Sev2]);
}

#[test]
fn a_table_that_cannot_be_used_is_refused_with_its_row() {
    let no_class = Table::built_in().with("[[rule]]\nclass = \"nope\"\nline = [\"x\"]\nsource = \"s\"").unwrap_err();
    assert_eq!(no_class.to_string(), "rule 1 names class \"nope\", which is neither in this table nor built in");
    let empty = Table::built_in().with("[[rule]]\nclass = \"killed\"\nline = []\nsource = \"s\"").unwrap_err();
    assert_eq!(empty, TableError::Empty(1));
    let unknown = Table::built_in().with("[[clas]]\nname = \"x\"").unwrap_err();
    assert!(unknown.to_string().contains("clas"), "{unknown}");
}
