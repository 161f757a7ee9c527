//! `everstep plan throughput`: what a model achieves on a number of GPUs, and its best layout.

use super::{Failure, charts, print_json, text, write};
use clap::Args;
use everstep_planner::throughput::{Best, Calibration, Hardware, Point, Transformer, best};
use everstep_wire::output::{FIRST, LayoutSeconds, SizeThroughput, Throughput};
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
pub struct ThroughputOptions {
    /// gpt3-125m to gpt3-175b, llama3-8b, llama3-70b, llama3-405b, or a .toml file
    #[arg(long)]
    model: String,
    /// Number of GPUs, or a range FIRST:LAST:STEP
    #[arg(long)]
    gpus: String,
    /// a100-80, a100-40, a800, h100, h800, or a .toml file
    #[arg(long)]
    hardware: String,
    /// Samples per step [default: the model's]
    #[arg(long)]
    batch: Option<u64>,
    /// Measured points, which override the computed ones and scale the rest (CSV)
    #[arg(long, value_name = "FILE")]
    points: Option<PathBuf>,
    /// Write a chart (SVG)
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Parses a number or a range such as `8:128:8`.
fn numbers(of: &str) -> Result<Vec<u64>, Failure> {
    let parts: Option<Vec<u64>> = of.split(':').map(|p| p.parse().ok().filter(|n| (1..=200_000).contains(n))).collect();
    let wrong = || Failure::usage(format!("--gpus {of}: give a number of GPUs, or FIRST:LAST:STEP, as in 8:128:8"));
    let found: Vec<u64> = match parts.ok_or_else(wrong)?.as_slice() {
        [one] => vec![*one],
        [first, last] if first <= last => (*first..=*last).collect(),
        [first, last, step] if first <= last => (*first..=*last).step_by(usize::try_from(*step).unwrap_or(1)).collect(),
        _ => return Err(wrong()),
    };
    if found.len() > 2000 {
        Err(Failure::usage(format!("--gpus {of}: these are {} numbers; 2000 at most", found.len())))
    } else {
        Ok(found)
    }
}

/// Prints the best layout for each number of GPUs.
pub fn run(o: &ThroughputOptions) -> Result<i32, Failure> {
    let file = |name: &str| name.ends_with(".toml").then(|| text(Path::new(name))).transpose();
    let model = file(&o.model)?.map_or_else(|| Transformer::named(&o.model), |t| Transformer::read(&t));
    let mut model = model.map_err(Failure::usage)?;
    if let Some(batch) = o.batch {
        model.batch = if batch > 0 { batch } else { return Err(Failure::usage("--batch 0: give at least 1")) };
    }
    let on = file(&o.hardware)?
        .map_or_else(|| Hardware::named(&o.hardware), |t| Hardware::read(&t))
        .map_err(Failure::usage)?;
    let points =
        o.points.as_deref().map(|p| text(p).and_then(|t| Point::read(&t).map_err(Failure::usage))).transpose()?;
    let known = Calibration::of(points.unwrap_or_default());
    let found: Vec<(u64, Option<Best>)> =
        numbers(&o.gpus)?.into_iter().map(|n| (n, best(&model, n, &on, &known))).collect();
    if let Some(path) = &o.svg {
        let picture = charts::dips(&found, &format!("{} on {}", model.name, on.name));
        write(path, &picture)?;
    }
    if o.json {
        print_json(&document(&model, &on, &found))?;
        return Ok(0);
    }
    println!(
        "{} ({:.1} B parameters, {} samples of {} tokens a step) on {}",
        model.name,
        model.parameters() as f64 / 1e9,
        model.batch,
        model.sequence,
        on.name
    );
    println!("  {:>6} {:>9} {:>7} {:>8} {:>8}  layout", "GPUs", "TFLOP/s", "of peak", "step", "memory");
    for (gpus, of) in &found {
        let Some(b) = of else {
            println!("  {gpus:>6}         -  nothing fits: no layout on this number of GPUs has room for this model");
            continue;
        };
        let per = b.achieved / *gpus as f64;
        let step = model.operations(everstep_planner::throughput::Recompute::Nothing) / b.achieved;
        println!(
            "  {gpus:>6} {:>9.1} {:>5.1} % {:>6.2} s {:>5.0} GB  {}{}",
            per / 1e12,
            per / on.peak() * 100.0,
            step,
            b.memory.total / 1e9,
            b.layout,
            if b.measured { "  (measured)" } else { "" }
        );
    }
    Ok(0)
}

fn document(model: &Transformer, on: &Hardware, found: &[(u64, Option<Best>)]) -> Throughput {
    let one = |(gpus, of): &(u64, Option<Best>)| match of {
        None => SizeThroughput { gpus: *gpus, ..SizeThroughput::default() },
        Some(b) => SizeThroughput {
            gpus: *gpus,
            fits: true,
            flops: b.achieved,
            of_peak: Some(b.achieved / *gpus as f64 / on.peak()),
            measured: Some(b.measured),
            memory_bytes: Some(b.memory.total),
            tensor: Some(b.layout.tensor),
            pipeline: Some(b.layout.pipeline),
            data: Some(b.layout.data),
            micro_batch: Some(b.layout.micro_batch),
            interleaved: Some(b.layout.interleaved),
            recompute: Some(b.layout.recompute.name().to_owned()),
            seconds: Some(LayoutSeconds {
                compute: b.seconds.compute,
                tensor: b.seconds.tensor,
                stages: b.seconds.stages,
                bubble: b.seconds.bubble,
                data: b.seconds.data,
            }),
        },
    };
    let (model, parameters) = (model.name.clone(), model.parameters());
    Throughput { version: FIRST, model, parameters, hardware: on.name.clone(), sizes: found.iter().map(one).collect() }
}
