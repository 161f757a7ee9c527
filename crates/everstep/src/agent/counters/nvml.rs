//! NVIDIA's management library, loaded at run time: memory errors, links, temperatures, and
//! numbered errors (Xid) where the kernel's log cannot be read, as in most containers. Without the
//! library, nothing is read.
//!
//! Source: NVML API reference (nvmlDeviceGetFieldValues, nvmlDeviceGetCurrentClocksThrottleReasons,
//! nvmlEventSetWait).

use super::CounterSource;
use everstep_core::health::{Metric, Sample};
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING};
use nvml_wrapper::{Device, EventSet, Nvml};
use std::path::Path;
use std::time::Duration;

/// This name exists even without the development package.
pub const LIBRARY: &str = "libnvidia-ml.so.1";
/// More links than any GPU has.
const LINKS: u32 = 32;

/// The GPUs of this machine.
pub struct Gpus {
    library: &'static Nvml,
    /// PCI addresses, by index.
    devices: Vec<String>,
    events: Option<EventSet<'static>>,
}

/// Converts `00000000:3B:00.0` to the kernel's form, `0000:3b:00`.
fn address(bus: &str) -> String {
    let lower = bus.to_ascii_lowercase();
    let (domain, rest) = lower.split_once(':').unwrap_or(("0000", &lower));
    let domain = domain.get(domain.len().saturating_sub(4)..).unwrap_or(domain);
    format!("{domain}:{}", rest.split_once('.').map_or(rest, |(device, _)| device))
}

impl Gpus {
    /// Opens the GPUs that `library` finds. Returns `None` without a library, a driver or a GPU.
    #[must_use]
    pub fn open(library: &Path) -> Option<Gpus> {
        let loaded = Nvml::builder().lib_path(library.as_os_str()).init().ok()?;
        // Leaked once, for the life of the agent: the event set borrows it.
        let library: &'static Nvml = Box::leak(Box::new(loaded));
        let count = library.device_count().ok().filter(|count| *count > 0)?;
        let of = |index| Some(address(&library.device_by_index(index).ok()?.pci_info().ok()?.bus_id));
        let devices: Vec<String> = (0..count).map(|index| of(index).unwrap_or_default()).collect();
        let mut gpus = Gpus { library, devices, events: None };
        gpus.events = gpus.listen();
        Some(gpus)
    }

    fn listen(&self) -> Option<EventSet<'static>> {
        let mut set = self.library.create_event_set().ok()?;
        for index in 0..self.library.device_count().ok()? {
            let device = self.library.device_by_index(index).ok()?;
            set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).ok()?;
        }
        Some(set)
    }
}

/// Returns the values of one GPU, with an error for each that it does not support.
fn values(device: &Device<'_>) -> Vec<(Metric, Result<u64, NvmlError>)> {
    let mut all = vec![
        (Metric::Uncorrected, device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)),
        (Metric::Temperature, device.temperature(TemperatureSensor::Gpu).map(u64::from)),
        (Metric::Lanes, device.current_pcie_link_width().map(u64::from)),
    ];
    if let Ok(slowed) = device.current_throttle_reasons() {
        let by = |why: ThrottleReasons| Ok(u64::from(slowed.intersects(why)));
        all.push((Metric::TooHot, by(ThrottleReasons::HW_THERMAL_SLOWDOWN)));
        all.push((Metric::PowerBrake, by(ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN)));
    }
    let links: Vec<bool> = (0..LINKS).map_while(|link| device.link_wrapper_for(link).is_active().ok()).collect();
    if !links.is_empty() {
        all.push((Metric::LinksUp, Ok(links.iter().filter(|up| **up).count() as u64)));
    }
    let metrics = [Metric::RemapPending, Metric::RemapFailed];
    let ids = [FieldId(NVML_FI_DEV_REMAPPED_PENDING), FieldId(NVML_FI_DEV_REMAPPED_FAILURE)];
    for (metric, found) in metrics.into_iter().zip(device.field_values_for(&ids).unwrap_or_default()) {
        all.push((metric, found.and_then(|field| field.value).map(whole)));
    }
    all
}

fn whole(value: SampleValue) -> u64 {
    match value {
        SampleValue::U32(v) => v.into(),
        SampleValue::U64(v) => v,
        SampleValue::I64(v) => u64::try_from(v).unwrap_or(0),
        SampleValue::F64(_) => 0,
    }
}

/// The load of this machine's GPUs, for the detector.
pub struct Load {
    library: Nvml,
    devices: u32,
}

impl Load {
    /// Opens the GPUs that `library` finds. Returns `None` without a library, a driver or a GPU.
    #[must_use]
    pub fn open(library: &Path) -> Option<Load> {
        let library = Nvml::builder().lib_path(library.as_os_str()).init().ok()?;
        let devices = library.device_count().ok().filter(|count| *count > 0)?;
        Some(Load { library, devices })
    }

    /// Returns the model of the first GPU.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        self.library.device_by_index(0).ok()?.name().ok()
    }

    /// Returns the values by their names in the catalogue. Of several GPUs, the least busy or
    /// hottest counts, because one straggler delays them all; memory is summed.
    #[must_use]
    pub fn now(&self) -> Vec<(&'static str, f32)> {
        let all: Vec<Device<'_>> = (0..self.devices).filter_map(|at| self.library.device_by_index(at).ok()).collect();
        let of = |name: &'static str, read: &dyn Fn(&Device<'_>) -> Option<f32>, fold: fn(f32, f32) -> f32| {
            all.iter().filter_map(read).reduce(fold).map(|value| (name, value))
        };
        let pcie = |device: &Device<'_>| {
            let [sent, received] = [PcieUtilCounter::Send, PcieUtilCounter::Receive].map(|c| device.pcie_throughput(c));
            Some((sent.ok()? + received.ok()?) as f32 * 1000.0)
        };
        [
            of("gpu-duty", &|d| Some(d.utilization_rates().ok()?.gpu as f32 / 100.0), f32::min),
            of("gpu-power", &|d| Some(d.power_usage().ok()? as f32 / 1000.0), f32::min),
            of("gpu-temperature", &|d| Some(d.temperature(TemperatureSensor::Gpu).ok()? as f32), f32::max),
            of("gpu-clock", &|d| Some(d.clock_info(Clock::SM).ok()? as f32), f32::min),
            of("gpu-memory", &|d| Some(d.memory_info().ok()?.used as f32), |a, b| a + b),
            of("pcie", &pcie, f32::min),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl CounterSource for Gpus {
    fn event(&mut self, time: Duration) -> Option<(String, String)> {
        let millis = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        match self.events.as_ref().map(|set| set.wait(millis)) {
            Some(Ok(event)) => {
                let device = address(&event.device.pci_info().ok()?.bus_id);
                let XidError::Value(code) = event.event_data? else { return None };
                let line = format!("NVRM: Xid (PCI:{device}): {code}, reported by NVML");
                Some((device, line))
            }
            Some(Err(NvmlError::Timeout)) => None,
            // This machine has no events, or a device is lost.
            Some(Err(_)) | None => {
                std::thread::sleep(time);
                None
            }
        }
    }

    fn sample(&mut self) -> Vec<Sample> {
        let mut all = Vec::new();
        for (index, address) in (0..).zip(&self.devices) {
            let lost = |e: &NvmlError| matches!(e, NvmlError::GpuLost);
            let (read, error) = match self.library.device_by_index(index) {
                Ok(device) => (values(&device), None),
                Err(e) => (Vec::new(), Some(e)),
            };
            let gone = error.iter().chain(read.iter().filter_map(|(_, r)| r.as_ref().err())).any(lost);
            let sample = |metric, value| Sample { device: address.clone(), metric, value };
            all.push(sample(Metric::Lost, gone.into()));
            all.extend(read.iter().filter_map(|(metric, r)| Some(sample(*metric, *r.as_ref().ok()?))));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn addresses_are_those_of_the_kernel() {
        assert_eq!(super::address("00000000:3B:00.0"), "0000:3b:00");
        assert_eq!(super::address("0000:c1:00.0"), "0000:c1:00");
    }
}
