//! What a node does in its job at present, in one word.

use super::{Job, Node};

/// What a node does in its job at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Its workers train.
    Active,
    /// It takes part in the job, which is between generations: it starts, restarts or stops.
    Waiting,
    /// It is kept ready to replace another node.
    Spare,
    /// It is excluded from the job.
    Excluded,
    /// Its agent has no connection.
    Lost,
}

impl NodeState {
    /// Returns the word for it in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodeState::Active => "active",
            NodeState::Waiting => "waiting",
            NodeState::Spare => "spare",
            NodeState::Excluded => "excluded",
            NodeState::Lost => "lost",
        }
    }
}

impl Job {
    /// Returns what one of the job's nodes does.
    #[must_use]
    pub fn state_of(&self, node: &Node) -> NodeState {
        let (id, world) = (&node.hello.node, &self.record.world);
        let member = world.slot(id).is_some();
        match node.session {
            None => NodeState::Lost,
            // One that is used for lack of others is not excluded.
            Some(_) if member && self.phase.is_training() => NodeState::Active,
            Some(_) if self.record.machines.exclusion(id, node.hello.incarnation).is_some() => NodeState::Excluded,
            // A job without a world has no spares yet.
            Some(_) if member || world.slots.is_empty() => NodeState::Waiting,
            Some(_) => NodeState::Spare,
        }
    }
}
