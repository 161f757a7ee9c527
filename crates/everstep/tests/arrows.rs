//! The dependencies between crates, checked with `cargo metadata`: those not listed here must not
//! exist.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

fn metadata() -> serde_json::Value {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--no-deps"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .expect("cargo runs");
    serde_json::from_slice(&out.stdout).expect("cargo metadata is JSON")
}

/// Returns the normal (not dev, not build) dependencies by package: name, and whether it is
/// optional.
fn dependencies() -> BTreeMap<String, BTreeSet<(String, bool)>> {
    let metadata = metadata();
    let packages = metadata["packages"].as_array().expect("packages").iter();
    packages
        .map(|p| {
            let deps = p["dependencies"].as_array().expect("dependencies").iter().filter(|d| d["kind"].is_null());
            let pairs = deps.map(|d| (d["name"].as_str().expect("name").to_owned(), d["optional"] == true));
            (p["name"].as_str().expect("name").to_owned(), pairs.collect())
        })
        .collect()
}

#[test]
fn crates_use_only_what_the_arrows_allow() {
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("everstep-rng", &[] as &[&str]),
        ("everstep-planner", &[]),
        ("everstep-core", &["everstep-planner"]),
        ("everstep-replay", &["everstep-core", "everstep-planner", "everstep-rng"]),
        ("everstep-wire", &["everstep-core"]),
        ("everstep-checkpoint", &["everstep-core", "everstep-wire"]),
        ("everstep-sim", &["everstep-core", "everstep-rng"]),
        ("everstep-fleet", &["everstep-detector", "everstep-rng"]),
        // It stands alone, so it cannot know how a generator produced its samples.
        ("everstep-detector", &[]),
        (
            "everstep",
            &[
                "everstep-core",
                "everstep-planner",
                "everstep-replay",
                "everstep-wire",
                "everstep-checkpoint",
                "everstep-detector",
            ],
        ),
        ("everstep-fuzz", &["everstep", "everstep-core", "everstep-wire", "everstep-checkpoint"]),
        ("everstep-python", &["everstep-core", "everstep-wire", "everstep-checkpoint"]),
    ]);
    for (name, dependencies) in dependencies() {
        let allowed = allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} has no place in the picture"));
        for (dependency, _) in dependencies.iter().filter(|(d, _)| d.starts_with("everstep")) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not use {dependency}");
        }
    }
}

#[test]
fn the_core_is_pure_and_the_training_process_has_no_server() {
    let all = dependencies();
    let core: Vec<_> = all["everstep-core"].iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(
        core,
        ["everstep-planner", "schemars", "serde", "serde_json", "thiserror", "toml"],
        "the core decides; it needs nothing else"
    );
    // The server stack is optional in wire, and the Python package does not enable it.
    for server in ["tokio", "axum", "hyper", "hyper-util"] {
        assert!(all["everstep-wire"].contains(&(server.into(), true)), "{server} must be optional in wire");
        for package in ["everstep-checkpoint", "everstep-python", "everstep-sim", "everstep-replay"] {
            // Clients of object stores use it, in a runtime that starts when the first URL is
            // opened.
            let client = server == "tokio" && package == "everstep-checkpoint";
            // With the feature `one-build`, which only tests ask for, the Python package has it and
            // does not use it.
            let uses = |(name, optional): &(String, bool)| name == server && !optional;
            assert!(client || !all[package].iter().any(uses), "{package} must not use {server}");
        }
    }
}

#[test]
fn only_object_stores_are_asynchronous_where_bytes_are_moved() {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../checkpoint/src"));
    let mut open = vec![root.to_path_buf()];
    let mut found = 0;
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if std::fs::read_to_string(&path).is_ok_and(|t| t.contains("tokio::") || t.contains("async ")) {
                assert!(path.starts_with(root.join("objects")), "{} is asynchronous", path.display());
                found += 1;
            }
        }
    }
    assert!(found > 0, "the check looks where nothing is");
}

#[test]
fn no_source_file_is_longer_than_the_wall() {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut open = vec![
        root.join("crates"),
        root.join("python"),
        root.join("harness"),
        root.join("figures"),
        root.join("examples"),
        root.join("fuzz"),
    ];
    let mut long = Vec::new();
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("target") && !path.ends_with(".venv") {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "py") {
                let lines = std::fs::read_to_string(&path).map_or(0, |t| t.lines().count());
                if lines > 500 {
                    long.push(format!("{} has {lines} lines", path.display()));
                }
            }
        }
    }
    assert!(long.is_empty(), "one responsibility each: {long:?}");
}
