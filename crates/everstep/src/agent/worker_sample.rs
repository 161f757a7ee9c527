//! What the step board and /proc show about a worker.

use everstep_checkpoint::step_board::{Board, Section, Word, monotonic};
use everstep_core::agent::observation::{
    Interpreter, Observation, Process, Script, Section as Doing, Trainer, TrainerEnd,
};
use everstep_core::ledger::Reading;
use everstep_core::progress::RankProgress;

/// Returns the state letter and the CPU time in milliseconds from `/proc/PID/stat`.
fn process_state(pid: u32) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let state = fields.first()?.chars().next()?;
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Some((state, ticks * 1000 / per_second))
}

/// Returns the process that has claimed the step board in place of the launched one.
fn trainer(launched: u32, board: &Board) -> Option<Trainer> {
    let pid = board.worker();
    let end = || {
        let ended = board.worker_lives() == Some(false);
        let end = match board.get(Word::ShuttingDown) {
            1 | 2 => TrainerEnd::Over,
            3 => TrainerEnd::Left,
            // 256 and more: its script failed.
            _ => TrainerEnd::Vanished,
        };
        // Whatever it wrote, it wrote before it ended; another process may have claimed the board
        // since.
        (ended && board.is_of(pid)).then_some(end)
    };
    (pid != 0 && pid != launched).then(|| Trainer { pid, end: end() })
}

/// Returns the process whose work counts: the one that has claimed the step board, while it lives.
fn working(launched: u32, board: &Board) -> u32 {
    if board.worker_lives() == Some(true) { board.worker() } else { launched }
}

/// Takes one look at a worker.
pub fn observe(pid: u32, board: &Board) -> Observation {
    let (state, cpu_ms) = process_state(working(pid, board)).unwrap_or(('?', 0));
    let micros = |section| board.time_in(section) / 1000;
    // The worker writes this word last, so the numbers read after it are those it describes.
    let numbered = board.get(Word::Numbered) == 1;
    // Behind a launched program, the script may be one of several.
    let shutdown = if board.is_of(pid) { board.get(Word::ShuttingDown) } else { 0 };
    Observation {
        step: (board.get(Word::StepKnown) == 1).then(|| board.get(Word::Step)),
        total: Some(board.get(Word::Total)).filter(|total| *total > 0),
        passes: board.get(Word::Passes),
        restored: board.get(Word::Restored),
        beats: board.get(Word::Beats),
        section: Doing {
            inside: board.get(Word::SectionDepth) > 0,
            timeout_ms: board.get(Word::SectionTimeout),
            awaits_copies: board.get(Word::AwaitsCopies) == 1,
            waits_for_data: board.get(Word::SectionKind) == Section::Data as u64,
        },
        process: Process { stopped: state == 'T', runnable: state == 'R', cpu_ms },
        interpreter: Interpreter {
            ticks: board.get(Word::InterpreterTicks),
            free_ticks: board.get(Word::FreeTicks),
            stack_changes: board.get(Word::StackChanges),
        },
        flags_stop: board.get(Word::FlagsStop) == 1,
        from_outside: board.get(Word::ZeroLine) == 1,
        numbered,
        reading: Reading {
            since_step: monotonic().saturating_sub(board.get(Word::StepAt)) / 1000,
            data: micros(Section::Data),
            eval: micros(Section::Eval),
            stall: micros(Section::Save) + (board.get(Word::BlockingNanos) + board.get(Word::FenceNanos)) / 1000,
            restore: micros(Section::Restore),
            ..Reading::default()
        },
        script: match shutdown {
            1 => Script::Over,
            2 => Script::LeftAtOnce,
            _ => shutdown.checked_sub(256).and_then(|code| code.try_into().ok()).map_or(Script::Runs, Script::Failed),
        },
        trainer: trainer(pid, board),
    }
}

/// Converts an observation for `everstep status`.
pub fn progress(rank: u32, pid: u32, board: &Board, seen: &Observation) -> RankProgress {
    let doing = match () {
        () if seen.process.stopped => "stopped".to_owned(),
        () if seen.section.inside => format!("section {}", board.section()),
        () if seen.section.waits_for_data => "waiting for data".to_owned(),
        () if seen.step.is_some() => "step".to_owned(),
        () => "starting".to_owned(),
    };
    let micros = |word| Some(board.get(word) / 1000).filter(|us| *us > 0);
    let step_ms = board.get(Word::StepNanos) / 1_000_000;
    RankProgress {
        rank,
        pid,
        step: seen.step,
        step_ms: (step_ms > 0).then_some(step_ms),
        warm: false,
        step_us: micros(Word::StepNanos),
        own_us: micros(Word::ComputeNanos),
        sealed: board.get(Word::Sealed).checked_sub(1),
        counted: !seen.numbered,
        doing,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_is_known_to_have_ended_has_an_end() {
        let dir = tempfile::tempdir().unwrap();
        let board = Board::create(&dir.path().join("board"), 1).unwrap();
        assert_eq!(trainer(1, &board), None, "nobody has claimed it");
        assert!(board.claim());
        let own = std::process::id();
        let ended = |end| Some(Trainer { pid: own, end });
        assert_eq!(trainer(own, &board), None, "the launched process");
        assert_eq!(trainer(1, &board), ended(None));
        // Another process, which has ended, had this number.
        board.set(Word::Worker, board.get(Word::Worker) ^ (1 << 32));
        let ends = [TrainerEnd::Vanished, TrainerEnd::Over, TrainerEnd::Over, TrainerEnd::Left];
        for (shutdown, end) in ends.into_iter().enumerate() {
            board.set(Word::ShuttingDown, shutdown as u64);
            assert_eq!(trainer(1, &board), ended(Some(end)));
        }
        board.set(Word::ShuttingDown, 256 + 130);
        assert_eq!(trainer(1, &board), ended(Some(TrainerEnd::Vanished)), "interrupted");
        // A container has numbers of its own.
        board.set(Word::PidNamespace, board.get(Word::PidNamespace) + 1);
        assert_eq!(trainer(1, &board), ended(None));
    }

    #[test]
    fn the_process_that_trains_is_looked_at_while_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let board = Board::create(&dir.path().join("board"), 1).unwrap();
        let own = std::process::id();
        assert_eq!(working(1, &board), 1);
        assert!(board.claim());
        assert_eq!(working(1, &board), own);
        board.set(Word::Worker, board.get(Word::Worker) ^ (1 << 32));
        assert_eq!(working(1, &board), 1);
    }
}
