//! `papers DIRECTORY [SEEDS]`: writes the tables of docs/benchmarks and prints them as JSON lines.
//! If DIRECTORY is `-` or missing, it only prints them.

use everstep_planner::Mode;
use everstep_replay::papers::{Origin, PaperError, Row, checkfreq, ettr, gemini, unicron};
use serde_json::json;
use std::fmt::Write as _;
use std::path::PathBuf;

fn table(rows: &[Row]) -> String {
    let mut text = "| what | paper | ours | off | | assumed |\n|---|---|---|---|---|---|\n".to_owned();
    for r in rows {
        let origin = if r.origin == Origin::Fitted { "fitted" } else { "predicted" };
        let _ = writeln!(
            text,
            "| {} | {} | {:.4} | {:+.2} % | {origin} | {} |",
            r.what,
            r.paper,
            r.ours,
            r.off() * 100.0,
            r.assumed
        );
    }
    text
}

fn lines(of: &str, rows: &[Row]) {
    for r in rows {
        let fitted = r.origin == Origin::Fitted;
        println!(
            "{}",
            json!({"of": of, "what": r.what, "paper": r.paper, "ours": r.ours, "fitted": fitted, "assumed": r.assumed})
        );
    }
}

fn main() -> Result<(), String> {
    let mut args = std::env::args().skip(1);
    let directory = args.next().filter(|d| d != "-").map(PathBuf::from);
    let seeds = args.next().and_then(|n| n.parse().ok()).unwrap_or(200);
    let text = |e: PaperError| e.to_string();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (figure_11, fitted) = unicron::figure_11(seeds, threads).map_err(text)?;
    let ablation = unicron::ablation(seeds, threads).map_err(text)?;
    let (gemini, ettr, checkfreq) = (gemini::rows(), ettr::rows(seeds, threads).map_err(text)?, checkfreq::rows());
    lines("unicron-fig11", &figure_11);
    lines("gemini-figures", &gemini);
    lines("ettr", &ettr);
    lines("checkfreq", &checkfreq);
    for (name, [a, b]) in &ablation {
        println!("{}", json!({"of": "ablation", "what": name, "trace_a": a, "trace_b": b}));
    }
    for (name, efficiency) in &fitted {
        println!("{}", json!({"of": "fitted", "what": name, "efficiency": efficiency}));
    }
    let mut cases = "| case | mode | way | nodes | WAF (PFLOP/s) |\n|---|---|---|---|---|\n".to_owned();
    for number in 1..=5 {
        for (called, mode) in [("floor", Mode::Floor), ("paper", Mode::Paper)] {
            for way in unicron::ways(number, mode).map_err(text)? {
                println!(
                    "{}",
                    json!({"of": "unicron-cases", "case": number, "mode": called, "way": way.name, "nodes": way.nodes, "waf": way.waf})
                );
                let _ = writeln!(cases, "| {number} | {called} | {} | {:?} | {:.2} |", way.name, way.nodes, way.waf);
            }
        }
    }
    let Some(directory) = directory else { return Ok(()) };
    let write = |name: &str, text: String| {
        std::fs::write(directory.join(name), text)
            .map_err(|e| format!("cannot write {name} into {}: {e}", directory.display()))
    };
    let mut parts = "| what goes on | trace-a | trace-b |\n|---|---|---|\n".to_owned();
    for (name, [a, b]) in &ablation {
        let _ = writeln!(parts, "| {name} | {a:.3} | {b:.3} |");
    }
    let mut order = "| policy | seconds |\n|---|---|\n".to_owned();
    for (name, seconds) in unicron::figure_9().map_err(text)? {
        let _ = writeln!(order, "| {name} | {seconds:.0} |");
    }
    let efficiencies: Vec<String> = fitted.iter().map(|(name, e)| format!("{name} {e:.4}")).collect();
    write(
        "unicron.md",
        format!(
            "# Unicron\n\nWritten by `make papers`. 16 nodes of 8 A800, jobs of table 3; speeds from the throughput model, as the paper has no table of them.\n\n\
             ## Figure 11: accumulated WAF\n\n{}\nFitted on trace-a only: {}. Repairs on trace-b take 4 to 20 hours (not published).\n\n\
             ## What each part brings (not in the paper): what Unicron achieves by it\n\n{parts}\n\
             ## Table 3 with figure 10c\n\n{cases}\n## Figure 9: from a node's failure to new work, mean (bars without numbers; the order)\n\n{order}",
            table(&figure_11),
            efficiencies.join(", "),
        ),
    )?;
    write("gemini.md", format!("# Gemini\n\nWritten by `make papers`.\n\n{}", table(&gemini)))?;
    write(
        "ettr.md",
        format!(
            "# Share of time that trains: closed form and simulation\n\nWritten by `make papers`.\n\n{}",
            table(&ettr)
        ),
    )
}
