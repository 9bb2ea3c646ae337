//! The inputs of a batch in memory of the device that computes (ADR 62, ADR 66).
//!
//! Always true here: an input that was read as bytes leaves as floats, on the device or on the
//! host. They have the bits of the transforms.

use std::collections::BTreeSet;
use std::sync::Arc;

use data::{BadRecord, Batch, Column, Dataset, DeviceValues};
use kernels::cpu::levels::look_up;
use kernels::{Device, Levels};
use proto::column::ElementType;
use proto::ids::Epoch;
use proto::tensor::{DType, DeviceMemory};

/// Values of an input on the device.
type Placed = Arc<dyn DeviceMemory>;

/// How the inputs of a data set's batches are read, and copied to the device that computes.
#[derive(Debug)]
pub struct Inputs {
    device: Device,
    /// Inputs that are read as bytes. Empty: there is none.
    kept: Vec<Option<Kept>>,
}

/// What the bytes of an input become: tables on the device, and on the host for batches that find
/// no room there.
#[derive(Debug)]
struct Kept {
    there: Levels,
    here: data::Levels,
}

impl Kept {
    fn new(device: &Device, here: &data::Levels) -> Result<Self, kernels::Error> {
        Ok(Self { there: Levels::new(device, here.tables(), here.run())?, here: here.clone() })
    }

    /// Returns the floats of an input on the host.
    fn floats(&self, input: &Column) -> Column {
        let mut floats = vec![0.0; input.bytes().len()];
        look_up(self.here.tables(), self.here.run(), input.bytes(), &mut floats);
        Column::floats(&input.spec().name, &input.spec().shape, input.records(), &floats)
    }
}

impl Inputs {
    /// Returns how batches of a data set get to a device. A batch that is mixed has to be read as
    /// floats.
    pub fn new(device: &Device, data: &Dataset, mixes: bool) -> Self {
        let device = device.clone();
        let none = Self { device: device.clone(), kept: Vec::new() };
        if device.is_host() || mixes || data.levels().iter().all(Option::is_none) {
            return none;
        }
        let kept = |levels: &Option<data::Levels>| levels.as_ref().map(|levels| Kept::new(&device, levels));
        match data.levels().iter().map(|levels| kept(levels).transpose()).collect() {
            Ok(kept) => Self { kept, ..none },
            Err(reason) => {
                tracing::debug!(%reason, "records are not copied to the device as bytes");
                none
            }
        }
    }

    /// Reads records of the data set, as [`Dataset::read`] does. An input may be bytes until the
    /// batch is [`placed`](Self::placed).
    ///
    /// # Errors
    /// The errors of [`Dataset::read`].
    pub fn read(
        &self,
        data: &Dataset,
        epoch: Epoch,
        records: impl IntoIterator<Item = u64>,
        skipped: &BTreeSet<u64>,
    ) -> data::Result<(Batch, Vec<BadRecord>)> {
        match self.kept.is_empty() {
            true => data.read(epoch, records, skipped),
            false => data.read_bytes(epoch, records, skipped),
        }
    }

    /// Returns a batch with its inputs in memory of the device. The thread that has read the
    /// records copies them, while the device computes. Where the device has no room, the model
    /// copies them itself, and says so if it cannot.
    #[must_use]
    pub fn placed(&self, mut batch: Batch) -> Batch {
        if self.device.is_host() || batch.samples == 0 {
            return batch;
        }
        let copies = batch.inputs.iter_mut().enumerate().map(|(at, input)| {
            let kept = self.kept.get(at).and_then(Option::as_ref);
            self.copy_of(input, kept).unwrap_or_else(|reason| {
                tracing::debug!(%reason, "records are not copied to the device ahead");
                if let Some(kept) = kept {
                    *input = kept.floats(input);
                }
                None
            })
        });
        let placed = DeviceValues::new(copies.collect());
        Batch { placed, ..batch }
    }

    /// Returns a copy of an input on the device. `None`: engines do not read such inputs there.
    ///
    /// # Errors
    /// The device has too little free memory, or takes no work.
    fn copy_of(&self, input: &Column, kept: Option<&Kept>) -> Result<Option<Placed>, kernels::Error> {
        let copy = match (kept, input.spec().dtype) {
            (Some(kept), _) => kept.there.of(input.bytes())?,
            (None, ElementType::F32) if !input.spec().ragged => {
                self.device.copy_of(DType::F32, input.bytes())?
            }
            (None, ElementType::I64) if !input.spec().ragged => {
                self.device.copy_of(DType::I64, input.bytes())?
            }
            (None, _) => return Ok(None),
        };
        Ok(Some(Arc::new(copy)))
    }
}
