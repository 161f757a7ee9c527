//! The driver's part in an erasure code over several nodes: it computes this node's stripes.

use super::pace::{Paced, STREAMS};
use everstep_checkpoint::arena::Slot;
use everstep_checkpoint::erasure::encode::{Task, encode};
use everstep_checkpoint::erasure::streams::Streams;
use everstep_checkpoint::replicate::protocol::{ParityWant, Peer, Want};
use everstep_checkpoint::replicate::replica_holder::ReplicaHolder;
use everstep_core::id::{Generation, Step};
use everstep_core::message::{Member, Stripe};
use std::io;
use std::sync::Arc;

/// A step of a history, and the round of its replication.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub generation: Generation,
    pub step: Step,
    pub world_size: u32,
    pub round: u64,
    /// The step that all ranks would go back to now.
    pub base: Option<Step>,
}

/// What a node has to compute with.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    pub holder: &'a ReplicaHolder,
    pub streams: &'a Streams,
    /// Its own shards of the step.
    pub slots: &'a [Arc<Slot>],
}

/// Computes stripes. `like` is another agent of this job, at any address.
///
/// # Errors
/// Those of [`encode`].
pub fn compute(
    stripes: &[Stripe],
    at: &Moment,
    like: &Peer,
    Node { holder, streams, slots }: Node<'_>,
    gate: &mut Paced,
) -> io::Result<()> {
    let window = gate.window(STREAMS);
    // Other nodes' shards are about as long as this one's: as much comes in, and all of the parity
    // but the first part goes out.
    let shards: u64 = slots.iter().map(|s| s.region_bytes()).sum();
    let (data, out) = stripes.first().map_or((1, 0), |s| (s.members.len() as u64, s.keepers.len() as u64));
    let under_way = window.extent * window.buffers * window.streams * data as usize;
    gate.expect(shards + shards / data * out, under_way as u64);
    let gate = &*gate;
    stripes.iter().try_for_each(|stripe| {
        let task = task(stripe, at, like, holder.run());
        // SAFETY: the core begins one round of replication at a time, this thread computes all of
        // its stripes, and no stripe is given to two nodes. Keepers are brought its other parity
        // shards.
        unsafe { encode(&task, holder, streams, gate, window) }
    })
}

fn task(stripe: &Stripe, at: &Moment, like: &Peer, run: u64) -> Task {
    let (generation, step, world_size) = (at.generation.0, at.step.0, u64::from(at.world_size));
    let peer = |address: &str| Peer { address: address.to_owned(), ..like.clone() };
    let member = |m: &Member| {
        let want = Want { rank: u64::from(m.rank?.0), world_size, generation, step };
        Some((peer(&m.address), want))
    };
    Task {
        of: ParityWant { stripe: stripe.number, number: 0, world_size, generation, step },
        run,
        members: stripe.members.iter().map(member).collect(),
        keepers: stripe.keepers.iter().map(|k| peer(&k.address)).collect(),
        round: at.round,
        base: at.base.map(|s| s.0),
    }
}
