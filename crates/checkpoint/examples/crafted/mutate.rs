//! Changes by somebody who knows the format.

use crate::random::Random;
use crate::shard::{Checkpoint, Line, Shard};
use everstep_checkpoint::format::shard::{PLACES_KEY, VALUES_KEY, chunks_to_text};
use serde_json::{Value, json};

/// A change of one kind to the shard of a number, by its name.
pub type Kind = (&'static str, fn(&mut Random, &mut Checkpoint, usize));

/// All kinds. Those of lines are also made in the indexes of slots.
pub const KINDS: [Kind; 21] = [
    ("none", |_, _, _| {}),
    ("value", |r, c, n| value(r, &mut c.shards[n])),
    ("length", |r, c, n| length(r, &mut c.shards[n])),
    ("overlap", |r, c, n| overlap(r, &mut c.shards[n])),
    ("offset", |r, c, n| offset(r, &mut c.shards[n])),
    ("dtype", |r, c, n| dtype(r, &mut c.shards[n])),
    ("shape", |r, c, n| shape(r, &mut c.shards[n])),
    ("huge", |r, c, n| huge(r, &mut c.shards[n])),
    ("name", |r, c, n| name(r, &mut c.shards[n])),
    ("more", |r, c, n| more(r, &mut c.shards[n])),
    ("fewer", |r, c, n| fewer(r, &mut c.shards[n])),
    ("order", |r, c, n| order(r, &mut c.shards[n])),
    ("region", |r, c, n| region(r, &mut c.shards[n])),
    ("chunks", |r, c, n| chunks(r, &mut c.shards[n])),
    ("places", |r, c, n| words(r, &mut c.shards[n], PLACES_KEY, ' ')),
    ("values", |r, c, n| words(r, &mut c.shards[n], VALUES_KEY, ':')),
    ("metadata", |r, c, n| metadata(r, &mut c.shards[n])),
    ("header-length", |r, c, n| c.shards[n].length = Some(r.instead_of(4088))),
    ("header-text", |_, c, n| c.shards[n].text = Some(text)),
    ("entry", |_, c, n| c.shards[n].entry = Some(entry)),
    ("manifest", |_, c, _| c.manifest = Some(manifest)),
];

/// Kinds that change lines or bytes of one shard.
pub const OF_LINES: std::ops::Range<usize> = 1..13;

/// Makes a change of this kind to some shard.
pub fn change(kind: usize, r: &mut Random, c: &mut Checkpoint) {
    let n = r.below(c.shards.len());
    KINDS[kind].1(r, c, n);
}

fn line<'a>(r: &mut Random, s: &'a mut Shard) -> Option<(usize, &'a mut Line)> {
    let n = r.below(s.lines.len().max(1));
    s.lines.get_mut(n).map(|line| (n, line))
}

/// The checksums of values right for what is there now.
fn sum_values(s: &mut Shard) {
    let values: Vec<String> = s.values().iter().map(|(at, sum)| format!("{at:x}:{sum:x}")).collect();
    s.metadata.iter_mut().filter(|(k, _)| k == VALUES_KEY).for_each(|(_, v)| *v = json!(values.join(" ")));
}

fn value(r: &mut Random, s: &mut Shard) {
    for _ in 0..=r.below(4) {
        let at = r.below(s.region.len().max(1));
        if let Some(byte) = s.region.get_mut(at) {
            *byte ^= 1 << r.below(8);
        }
    }
    sum_values(s);
}

/// The bytes of one tensor become more or fewer; the others move along, with their bytes or
/// without.
fn length(r: &mut Random, s: &mut Shard) {
    let (along, another) = (!r.one_in(4), r.one_in(4));
    let Some((_, line)) = line(r, s) else { return };
    let (from, to) = (line.from as usize, line.to as usize);
    let bytes = to.saturating_sub(from);
    let now = match r.below(4) {
        // An earlier mutation may have put the end at the largest number that there is.
        0 => bytes.wrapping_add(1 + r.below(16)),
        1 => bytes.wrapping_add(64 * (1 + r.below(80))),
        2 => bytes.saturating_sub(1 + r.below(bytes.max(1))),
        _ => bytes / 2,
    };
    line.to = line.from.wrapping_add(now as u64);
    if another {
        // A tensor as good as any, that no model of this checkpoint has.
        (line.dtype, line.shape) = ("U8".into(), vec![now as u64]);
    }
    if along {
        s.close_up();
        if let Some(own) = s.region.get(from..to).map(<[u8]>::to_vec) {
            let new: Vec<u8> = own.iter().copied().chain(std::iter::repeat(0x77)).take(now).collect();
            s.region.splice(from..to, new);
        }
    }
    sum_values(s);
}

fn overlap(r: &mut Random, s: &mut Shard) {
    let back = 1 + r.next() % 64;
    let Some((n, line)) = line(r, s) else { return };
    line.from = line.from.saturating_sub(back);
    if r.one_in(2) {
        line.to = line.to.saturating_sub(back);
    } else if n > 0 {
        let other = s.lines[r.below(n)].clone();
        (s.lines[n].from, s.lines[n].to) = (other.from, other.to);
    }
}

fn offset(r: &mut Random, s: &mut Shard) {
    let (which, mut new) = (r.below(2), r.next());
    let Some((_, line)) = line(r, s) else { return };
    let old = if which == 0 { &mut line.from } else { &mut line.to };
    new = Random::new(new, 0).instead_of(*old);
    *old = new;
}

fn dtype(r: &mut Random, s: &mut Shard) {
    const NAMES: [&str; 20] = [
        "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64",
        "F64", "C64", "C128", "F4", "F33", "",
    ];
    let new = *r.of(&NAMES);
    if let Some((_, line)) = line(r, s) {
        line.dtype = new.into();
    }
}

fn shape(r: &mut Random, s: &mut Shard) {
    let (what, at, new) = (r.below(7), r.next() as usize, r.next());
    let Some((_, line)) = line(r, s) else { return };
    let shape = &mut line.shape;
    let at = at % shape.len().max(1);
    match what {
        0 => shape.reverse(),
        1 => shape.insert(at.min(shape.len()), 1),
        2 => *shape = vec![shape.iter().fold(1, |product: u64, n| product.wrapping_mul(*n))],
        3 => drop(shape.pop()),
        4 => shape.resize(60 + at % 8 + new as usize % 8, 1),
        5 => shape.insert(at.min(shape.len()), 0),
        _ => shape.iter_mut().skip(at).take(1).for_each(|n| *n = Random::new(new, 1).instead_of(*n)),
    }
}

/// Products and sums that do not fit, with a length that may fit.
fn huge(r: &mut Random, s: &mut Shard) {
    let shapes: [&[u64]; 8] = [
        &[1 << 32, 1 << 32],
        &[1 << 33, 1 << 31],
        &[u64::MAX, u64::MAX],
        &[1 << 62],
        &[(1 << 61) + 1, 2],
        &[1 << 63, 2, 4],
        &[0, u64::MAX, u64::MAX],
        &[0x1_0000_0001, 0xffff_ffff],
    ];
    let (shape, which, edge) = (*r.of(&shapes), r.below(3), r.instead_of(1 << 40));
    let close = r.one_in(2);
    let Some((_, line)) = line(r, s) else { return };
    if which < 2 {
        line.shape = shape.to_vec();
    }
    if which > 0 {
        line.to = line.from.wrapping_add(edge);
    }
    if close {
        s.close_up();
    }
}

fn name(r: &mut Random, s: &mut Shard) {
    let other = s.lines.get(r.below(s.lines.len().max(1))).map_or(String::new(), |l| l.name.clone());
    let new = match r.below(6) {
        0 | 1 => other,
        2 => "__metadata__".into(),
        3 => String::new(),
        4 => "n".repeat(1 + r.below(5000)),
        _ => "model.w\u{fc}\n\"\\\u{0}".into(),
    };
    if let Some((_, line)) = line(r, s) {
        line.name = new;
    }
}

fn more(r: &mut Random, s: &mut Shard) {
    let end = s.region.len() as u64;
    let bytes = if r.one_in(3) { 0 } else { 4 * (1 + r.next() % 400) };
    let shape = if r.one_in(4) { vec![bytes / 2] } else { vec![bytes / 4] };
    s.lines.push(Line { name: format!("more.{}", r.below(9)), dtype: "I32".into(), shape, from: end, to: end + bytes });
    s.region.extend((0..bytes).map(|b| b as u8));
}

fn fewer(r: &mut Random, s: &mut Shard) {
    if s.lines.is_empty() {
        return;
    }
    let gone = s.lines.remove(r.below(s.lines.len()));
    if !r.one_in(3) {
        s.close_up();
        let (from, to) = (gone.from as usize, gone.to as usize);
        if to <= s.region.len() && from <= to {
            s.region.drain(from..to);
        }
        sum_values(s);
    }
}

/// The same bytes under other names, or lines in another order.
fn order(r: &mut Random, s: &mut Shard) {
    let n = s.lines.len().max(1);
    let (a, b, names) = (r.below(n), r.below(n), r.one_in(2));
    s.lines.swap(a, b);
    if names && let Ok([one, other]) = s.lines.get_disjoint_mut([a, b]) {
        (one.from, other.from) = (other.from, one.from);
        (one.to, other.to) = (other.to, one.to);
    }
}

fn region(r: &mut Random, s: &mut Shard) {
    let bytes = 1 + r.below(9000);
    if r.one_in(2) {
        s.region.truncate(s.region.len().saturating_sub(bytes));
    } else {
        s.region.extend(std::iter::repeat_n(0x33, bytes));
    }
}

fn chunks(r: &mut Random, s: &mut Shard) {
    let mut crcs = s.crcs();
    match r.below(4) {
        0 => crcs.push(r.next()),
        1 => drop(crcs.pop()),
        2 => crcs.iter_mut().for_each(|c| *c ^= 1),
        _ => {}
    }
    let mut found = chunks_to_text(&crcs);
    match r.below(4) {
        0 => found.push('0'),
        1 => found = found.to_uppercase(),
        2 => found = found.replacen('0', "+", 1),
        _ => {}
    }
    s.chunks = Some(found);
}

/// One number of a table becomes another.
fn words(r: &mut Random, s: &mut Shard, key: &str, also: char) {
    let Some((_, value)) = s.metadata.iter_mut().find(|(k, _)| k == key) else { return };
    let Some(old) = value.as_str() else { return };
    let mut words: Vec<String> = old.split([' ', also]).map(str::to_owned).collect();
    let at = r.below(words.len());
    match r.below(6) {
        0 => drop(words.remove(at)),
        1 => words.insert(at, format!("{:x}", r.instead_of(1))),
        2 => words[at] = "x".into(),
        3 => words.truncate(at),
        _ => {
            let n = u64::from_str_radix(&words[at], 16).unwrap_or(0);
            words[at] = format!("{:x}", r.instead_of(n));
        }
    }
    let joined = words.iter().enumerate().fold(String::new(), |mut all, (n, word)| {
        if n > 0 {
            all.push(if n % 2 == 1 { also } else { ' ' });
        }
        all + word
    });
    *value = json!(joined);
}

fn odd(r: &mut Random) -> Value {
    let n = r.instead_of(7);
    [
        json!(n),
        json!(n.to_string()),
        json!(-1),
        json!(1.5),
        json!(null),
        json!([[[[]]]]),
        json!({"a": {}}),
        json!("\u{0}x"),
        json!(true),
    ][r.below(9)]
    .clone()
}

fn metadata(r: &mut Random, s: &mut Shard) {
    let n = r.below(s.metadata.len().max(1));
    match r.below(4) {
        0 if n < s.metadata.len() => drop(s.metadata.remove(n)),
        1 => s.metadata.push((format!("k{}", r.below(3)), json!("v"))),
        2 => s.metadata.extend(s.metadata.get(n).cloned()),
        _ => {
            let new = odd(r);
            s.metadata.get_mut(n).into_iter().for_each(|(_, v)| *v = new.clone());
        }
    }
}

/// Changes to the text of a header or index.
pub fn text(r: &mut Random, text: &mut Vec<u8>) {
    for _ in 0..=r.below(3) {
        let at = r.below(text.len().max(1));
        match r.below(6) {
            0 => text.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << r.below(8)),
            1 => text.truncate(at),
            2 => text.insert(at, *r.of(b"{}[],:\"0-9e. \\")),
            3 => drop(text.get(at).is_some().then(|| text.remove(at))),
            4 => text
                .iter_mut()
                .skip(at)
                .filter(|b| b.is_ascii_digit())
                .take(1)
                .for_each(|b| *b = b'0' + r.below(10) as u8),
            _ => {
                let deep = if r.one_in(2) { b"[".repeat(1 + r.below(400)) } else { b"{\"__metadata__\":{".to_vec() };
                text.splice(at..at, deep);
            }
        }
    }
}

fn entry(r: &mut Random, entry: &mut Value) {
    const FILES: [&str; 10] = [
        "../rank-0.safetensors",
        "/etc/passwd",
        "",
        ".",
        "..",
        "rank-1.safetensors",
        "a/b",
        "manifest.json",
        ".hidden",
        "rank\u{0}",
    ];
    let bytes = entry["bytes"].as_u64().unwrap_or(0);
    match r.below(6) {
        0 => entry["file"] = json!(r.of(&FILES)),
        1 => entry["bytes"] = json!(r.instead_of(bytes)),
        2 => entry["rank"] = json!(r.instead_of(1)),
        3 => entry["crc"] = json!(format!("{:016x}", r.next())),
        4 => entry["purpose"] = odd(r),
        _ => entry["more"] = odd(r),
    }
}

fn manifest(r: &mut Random, manifest: &mut Value) {
    const KEYS: [&str; 7] = ["version", "step", "world_size", "saved_at", "writer", "lineage", "shards"];
    match r.below(6) {
        0 => manifest["world_size"] = json!(r.instead_of(2)),
        1 => manifest["step"] = json!(r.instead_of(7)),
        2 => manifest[*r.of(&KEYS)] = odd(r),
        3 => {
            let all = manifest["shards"].as_array_mut();
            all.into_iter().for_each(|all| all.extend(all.first().cloned()));
        }
        4 => manifest["shards"].as_array_mut().into_iter().for_each(|all| all.reverse()),
        _ => manifest["shards"].as_array_mut().into_iter().for_each(|all| drop(all.pop())),
    }
}
