//! Where the nodes of a job meet, in torchrun's two styles: `static` (address and port of the
//! process-group store, with given node ranks) and rendezvous (an endpoint of the coordinator).

use super::{Failure, RunOptions};
use crate::listening::{Place, REMEDY, is_loopback};
use crate::paths;
use everstep_core::exit_code::ExitCode;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

const LOOPBACK: &str = "127.0.0.1";
/// torchrun's port for the c10d rendezvous.
const RENDEZVOUS_PORT: u16 = 29400;
/// torchrun's port for the static rendezvous.
const MASTER_PORT: u16 = 29500;

/// How this node finds the others.
#[derive(Debug)]
pub struct Meet {
    /// `HOST:PORT` of the coordinator. Port 0 means that the store's directory names the port.
    pub endpoint: String,
    /// Host or address at which other nodes reach this one.
    pub host: String,
    /// Where this node's own ports listen.
    pub place: Place,
    /// Whether this node starts the coordinator if none answers.
    pub may_host: bool,
    pub job: String,
    /// Directory of the coordinator's store.
    pub store: PathBuf,
    /// `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
    /// The user's fixed port for this node's process-group store. The coordinator is then reached
    /// through the same port.
    pub master_port: Option<u16>,
    /// Fixed node id (`--rdzv-backend static`).
    pub node: Option<String>,
}

/// Returns true if `host` is an address of this machine, that is, if a socket can be bound to it.
fn is_local(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs().into_iter().flatten();
    addresses.into_iter().any(|a| std::net::UdpSocket::bind(a).is_ok())
}

/// Returns the address from which this machine reaches `host`.
fn own_address(host: &str, port: u16) -> Option<String> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect((host, port)).ok()?;
    socket.local_addr().ok().map(|a| a.ip().to_string())
}

fn split(option: &str, endpoint: &str, default: u16) -> Result<(String, u16), Failure> {
    let Some((host, port)) = endpoint.rsplit_once(':') else { return Ok((endpoint.to_owned(), default)) };
    let port = port.parse::<u16>().ok().filter(|p| *p > 0);
    let bad = || Failure::usage(format!("{option} {endpoint} has no port between 1 and 65535"));
    Ok((host.to_owned(), port.ok_or_else(bad)?))
}

/// Refuses unknown hosts, and hosts beyond loopback without `--insecure` and a token.
fn check_reachable(o: &RunOptions, option: &str, host: &str, port: u16) -> Result<(), Failure> {
    if !(host, port).to_socket_addrs().is_ok_and(|mut a| a.next().is_some()) {
        return Err(Failure::new(
            ExitCode::Unavailable,
            format!("{option} {host} is not a known host; check the name, or give an address"),
        ));
    }
    if is_loopback(host) {
        return Ok(());
    }
    if !o.insecure {
        return Err(Failure::config(format!("{host} is not loopback and there is no TLS yet; {REMEDY}")));
    }
    if o.token_file.is_none() {
        return Err(Failure::config("--insecure needs --token-file, the same token in a 0600 file on all nodes"));
    }
    crate::say_warning!("INSECURE: the control plane on {host}:{port} is not encrypted");
    Ok(())
}

fn own_host(o: &RunOptions, host: &str, port: u16) -> Result<String, Failure> {
    let found = || if is_loopback(host) { Some("127.0.0.1".into()) } else { own_address(host, port) };
    o.local_addr.clone().or_else(found).ok_or_else(|| {
        Failure::config(format!("cannot determine this node's address: no route to {host}; set --local-addr to the address at which other nodes reach this node"))
    })
}

/// Returns where a node listens that others reach at `host`.
fn place(o: &RunOptions, host: &str) -> Result<Place, Failure> {
    if o.insecure && !is_loopback(host) && o.token_file.is_none() {
        return Err(Failure::config("--insecure needs --token-file, the same token in a 0600 file on all nodes"));
    }
    Place::at(host, o.insecure && o.token_file.is_some()).map_err(Failure::config)
}

fn checked_job(name: String) -> Result<String, Failure> {
    paths::check_name("job name", &name).map_err(Failure::usage)?;
    Ok(name)
}

/// Returns the meeting place that the options describe.
///
/// # Errors
/// Fails if options contradict each other, or if the place cannot be used.
pub fn meet(o: &RunOptions, nodes_max: u32) -> Result<Meet, Failure> {
    match o.rdzv_backend.as_deref() {
        None | Some("static" | "c10d" | "everstep") => {}
        Some("etcd" | "etcd-v2") => {
            return Err(Failure::usage(
                "--rdzv-backend etcd is not supported, because everstep needs no etcd server; use --rdzv-backend c10d --rdzv-endpoint HOST:PORT, where HOST is one of the nodes",
            ));
        }
        Some(other) => {
            return Err(Failure::usage(format!(
                "unknown --rdzv-backend {other}; use static, c10d or everstep (torchrun's rendezvous plug-ins work only under torchrun)"
            )));
        }
    }
    let master_given = o.master_addr.is_some() || o.master_port.is_some() || o.node_rank.is_some();
    let is_static = o.rdzv_backend.as_deref() == Some("static")
        || (o.rdzv_backend.is_none()
            && o.rdzv_endpoint.is_empty()
            && (o.master_port.is_some() || (nodes_max > 1 && master_given)));
    // Like torchrun: a single node without an address meets only itself.
    let place_given = !o.rdzv_endpoint.is_empty() || o.master_port.is_some();
    if o.standalone || (nodes_max == 1 && !place_given) {
        if nodes_max > 1 {
            return Err(Failure::usage("--standalone runs one node; for more give --rdzv-endpoint HOST:PORT instead"));
        }
        return alone(o, None);
    }
    if is_static {
        return fixed(o, nodes_max);
    }
    if o.rdzv_endpoint.is_empty() {
        return Err(Failure::usage(format!(
            "--nnodes {} needs --rdzv-endpoint HOST:PORT, the same on all nodes (or --master-addr, --master-port and each node's --node-rank)",
            o.nnodes
        )));
    }
    if nodes_max == 1 && o.rdzv_endpoint.ends_with(":0") {
        return alone(o, None);
    }
    let (host, port) = split("--rdzv-endpoint", &o.rdzv_endpoint, RENDEZVOUS_PORT)?;
    check_reachable(o, "--rdzv-endpoint", &host, port)?;
    let store = o.store.clone().unwrap_or_else(|| {
        paths::state().join("coordinators").join(format!("{}_{port}", host.replace([':', '/'], "_")))
    });
    let is_host = match o.conf()?.iter().find(|(k, _)| *k == "is_host") {
        Some((_, value)) => matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "t" | "yes" | "y"),
        None => is_local(&host),
    };
    let own = own_host(o, &host, port)?;
    Ok(Meet {
        endpoint: format!("{host}:{port}"),
        place: place(o, &own)?,
        host: own,
        may_host: is_host,
        job: checked_job(o.job_name().unwrap_or_else(|| format!("port-{port}")))?,
        store,
        run_id: o.rdzv_id.clone(),
        master_port: None,
        node: None,
    })
}

/// Returns the meeting place of a single node.
fn alone(o: &RunOptions, master: Option<(String, u16)>) -> Result<Meet, Failure> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let job = o.job_name().unwrap_or_else(|| format!("job-{}-{}", std::process::id(), nanos % 1_000_000));
    let job = checked_job(job)?;
    let store = o.store.clone().unwrap_or_else(|| paths::job(&job).join("store"));
    let (host, master_port) = master.map_or((None, None), |(h, p)| (Some(h), Some(p)));
    let mut host = host.or_else(|| o.local_addr.clone()).unwrap_or_else(|| LOOPBACK.into());
    if !is_loopback(&host) && !o.insecure {
        crate::say!(
            "listening on {LOOPBACK} instead of {host}, because the job has a single node (to listen on {host}, use --insecure --token-file FILE)"
        );
        host = LOOPBACK.into();
    }
    let place = place(o, &host)?;
    let run_id = if master_port.is_some() { o.rdzv_id.clone() } else { job.clone() };
    Ok(Meet {
        endpoint: "127.0.0.1:0".into(),
        host,
        place,
        may_host: true,
        job,
        store,
        run_id,
        master_port,
        node: None,
    })
}

/// Handles `--master-addr` and `--master-port`: node 0 serves the process-group store there and
/// forwards other nodes to the coordinator.
fn fixed(o: &RunOptions, nodes_max: u32) -> Result<Meet, Failure> {
    let (host, port) = if o.rdzv_endpoint.is_empty() {
        (o.master_addr.clone().unwrap_or_else(|| "127.0.0.1".into()), o.master_port.unwrap_or(MASTER_PORT))
    } else {
        split("--rdzv-endpoint", &o.rdzv_endpoint, MASTER_PORT)?
    };
    if port == 0 {
        return Err(Failure::usage("--master-port 0 is not a port; give one that is free on node 0"));
    }
    if nodes_max == 1 {
        return alone(o, Some((host, port)));
    }
    check_reachable(o, "--master-addr", &host, port)?;
    let rank = o.node_rank.clone().or_else(|| std::env::var("SLURM_NODEID").ok()).filter(|n| !n.is_empty());
    let rank = rank.unwrap_or_else(|| "0".into());
    if !rank.parse::<u32>().is_ok_and(|r| r < nodes_max) {
        return Err(Failure::usage(format!(
            "--node-rank {rank} does not fit --nnodes {}; give each node its own rank from 0 to {}",
            o.nnodes,
            nodes_max - 1
        )));
    }
    let first = rank == "0";
    let store = o.store.clone().unwrap_or_else(|| paths::state().join("coordinators").join(format!("static_{port}")));
    let own = if first { host.clone() } else { own_host(o, &host, port)? };
    Ok(Meet {
        endpoint: if first { "127.0.0.1:0".into() } else { format!("{host}:{port}") },
        place: place(o, &own)?,
        host: own,
        may_host: first,
        job: checked_job(o.job_name().unwrap_or_else(|| format!("port-{port}")))?,
        store,
        run_id: o.rdzv_id.clone(),
        master_port: first.then_some(port),
        node: Some(rank),
    })
}
