//! Launches of the kernels: one typed function for each, and the layouts of their parameters.
//!
//! A driver checks neither number nor types of arguments. So every kernel is launched here and
//! nowhere else, and every struct that crosses is `repr(C)`.
#![expect(unsafe_code, reason = "kernels work on addresses that no type guards")]

use std::ffi::c_void;
use std::ptr;

use proto::wire::WireType;

use crate::cpu::dispatch::SUMS;
use crate::cpu::mean::Mean;
use crate::optimizer::{Prepared, Update};

/// Slots of the rule that has the most: `SLOTS_MAX` of `common.cuh`.
pub(crate) const SLOTS_MAX: usize = 3;

/// All kernels, by their names in the `.cu` files.
#[cfg(feature = "cuda")]
pub(crate) const KERNELS: [&str; 35] = [
    "sgd",
    "momentum",
    "adam",
    "amsgrad",
    "adagrad",
    "rmsprop",
    "rmsprop_moving",
    "rmsprop_centered",
    "rmsprop_centered_moving",
    "adadelta",
    "ftrl",
    "lamb",
    "squares",
    "squares_of_direction",
    "sum",
    "sum_bf16",
    "sum_f16",
    "round_bf16",
    "round_f16",
    "encode_bf16",
    "encode_f16",
    "decode_bf16",
    "decode_f16",
    "mean",
    "largest",
    "fill",
    "dense_forward",
    "dense_weight_gradient",
    "dense_bias_gradient",
    "dense_input_gradient",
    "relu",
    "relu_slope",
    "tanh_slope",
    "scale",
    "look_up",
];

/// Threads of a block. Each thread works on one element at a time.
const THREADS: u32 = 256;

/// Blocks of a launch at most. Threads of a longer chunk work on several elements each.
const BLOCKS_MAX: u64 = 4096;

/// Elements of a chunk that a block of an update works on at a time: `TILE` of `common.cuh`.
const TILE: u64 = 2048;

/// Blocks of a launch that a device takes.
const GRID_MAX: u64 = i32::MAX as u64;

/// Takes launches and runs them in their order.
pub(crate) trait Queue {
    /// What a launch may fail with.
    type Error;

    /// Queues a kernel, by its name in the `.cu` files.
    ///
    /// # Errors
    /// The queue did not take it.
    ///
    /// # Safety
    /// `arguments` lead to values with the types of the kernel's parameters. Addresses among them
    /// lead to memory of the queue's device that is long enough. Nothing else writes there before
    /// the kernel has run, and nothing else reads what it writes.
    unsafe fn launch(
        &self,
        kernel: &'static str,
        shape: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Self::Error>;
}

/// Number of blocks, and of threads in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

/// A place in the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Address(pub(crate) u64);

/// What a pass reads and writes: `Operands` of `common.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Operands {
    /// Number of elements.
    pub(crate) length: u64,
    pub(crate) weights: Address,
    /// The gradient, or its left half.
    pub(crate) left: Address,
    /// The right half, or [`Address::NOWHERE`].
    pub(crate) right: Address,
    /// Where slots are read, and where they are written.
    pub(crate) from: [Address; SLOTS_MAX],
    pub(crate) to: [Address; SLOTS_MAX],
    pub(crate) next: Address,
}

/// What a rule does to one chunk: `Pass` of `common.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Pass {
    pub(crate) operands: Operands,
    rule: Scalars,
    mean: Mean,
    unused: u32,
}

impl Operands {
    /// Returns operands of so many elements that lie nowhere yet.
    pub(crate) const fn of(length: usize) -> Self {
        let (nowhere, slots) = (Address::NOWHERE, [Address::NOWHERE; SLOTS_MAX]);
        let (weights, left, right, next) = (nowhere, nowhere, nowhere, nowhere);
        Self { length: length as u64, weights, left, right, from: slots, to: slots, next }
    }
}

/// The scalars of a rule, as they lie in its struct. Zeros follow.
pub(crate) type Scalars = [u32; 10];

const _: () = assert!(size_of::<Pass>() == 144, "the table of common.cuh");

// SAFETY: integers and floats, and no bytes between them: the sizes add up.
unsafe impl bytemuck::NoUninit for Pass {}

impl Pass {
    /// Returns the pass of an update, which may lack norms.
    pub(crate) fn new(update: &Update, operands: Operands) -> Self {
        let (.., rule) = update.rule.kernel();
        Self { operands, rule, mean: update.mean, unused: 0 }
    }
}

/// Passes in memory of the queue's device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    address: Address,
    /// Number of passes.
    count: u32,
    /// Elements of the longest chunk.
    longest: u64,
}

impl Table {
    /// Returns the table of passes that have been copied to an address.
    pub(crate) fn new(passes: &[Pass], address: Address) -> Self {
        let longest = passes.iter().map(|pass| pass.operands.length).max().unwrap_or(0);
        let count = u32::try_from(passes.len());
        Self { address, count: count.unwrap_or_else(|_| panic!("{} chunks", passes.len())), longest }
    }
}

impl Address {
    /// Leads to no memory.
    pub(crate) const NOWHERE: Self = Self(0);
}

impl Shape {
    /// Returns the shape of a launch for so many elements. `None`: there is nothing to launch.
    fn of(length: u64) -> Option<Self> {
        let blocks = length.div_ceil(u64::from(THREADS)).min(BLOCKS_MAX);
        (blocks > 0).then_some(Self { blocks: blocks as u32, threads: THREADS })
    }
}

impl Prepared {
    /// Returns the kernel of the rule, its number of slots, and the scalars that it takes.
    pub(crate) fn kernel(&self) -> (&'static str, usize, Scalars) {
        match self {
            Self::Sgd(rule) => ("sgd", 0, scalars(rule)),
            Self::Momentum(rule) => ("momentum", 1, scalars(rule)),
            Self::Adam(rule) => ("adam", 2, scalars(rule)),
            Self::Amsgrad(rule) => ("amsgrad", 3, scalars(rule)),
            Self::Adagrad(rule) => ("adagrad", 1, scalars(rule)),
            Self::Rmsprop(rule) => ("rmsprop", 1, scalars(rule)),
            Self::RmspropMoving(rule) => ("rmsprop_moving", 2, scalars(rule)),
            Self::RmspropCentered(rule) => ("rmsprop_centered", 2, scalars(rule)),
            Self::RmspropCenteredMoving(rule) => ("rmsprop_centered_moving", 3, scalars(rule)),
            Self::Adadelta(rule) => ("adadelta", 2, scalars(rule)),
            Self::Ftrl(rule) => ("ftrl", 2, scalars(rule)),
            Self::Lamb(rule) => ("lamb", 2, scalars(rule)),
        }
    }
}

/// Returns the scalars of a rule.
fn scalars<Rule: Copy>(rule: &Rule) -> Scalars {
    const { assert!(size_of::<Rule>() <= size_of::<Scalars>(), "RULE_BYTES of common.cuh") }
    let mut scalars = Scalars::default();
    // SAFETY: there is room for the rule. It is numbers without bytes between them.
    unsafe {
        ptr::copy_nonoverlapping(
            ptr::from_ref(rule).cast::<u8>(),
            scalars.as_mut_ptr().cast(),
            size_of::<Rule>(),
        );
    }
    scalars
}

/// Addresses of values, as a driver takes arguments. It only reads them.
macro_rules! arguments {
    ($($value:expr),*) => { &mut [$(ptr::from_ref(&$value).cast::<c_void>().cast_mut()),*] };
}

/// Applies a step to the chunks of a table, whose updates have the rule of `update`.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`], for all addresses in the table too.
pub(crate) unsafe fn apply<Q: Queue>(queue: &Q, update: &Update, table: &Table) -> Result<(), Q::Error> {
    let tiles = u32::try_from(table.longest.div_ceil(TILE)).expect("a chunk has fewer tiles");
    let blocks = (u64::from(table.count) * u64::from(tiles)).min(GRID_MAX) as u32;
    if blocks == 0 {
        return Ok(());
    }
    let (kernel, ..) = update.rule.kernel();
    let shape = Shape { blocks, threads: THREADS };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch(kernel, shape, arguments![table.address, table.count, tiles]) }
}

/// Writes what each chunk of a table contributes to the norms: 16 sums of squares, or twice as many
/// for a rule that needs two norms. [`squares_of`](crate::cpu::squares_of) adds them.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`], for all addresses in the table too. `sums` has room for [`SUMS_MAX`]
/// values of each chunk.
pub(crate) unsafe fn measure<Q: Queue>(
    queue: &Q,
    update: &Update,
    table: &Table,
    sums: Address,
) -> Result<(), Q::Error> {
    if table.count == 0 {
        return Ok(());
    }
    let kernel = match &update.rule {
        Prepared::Lamb(_) => "squares_of_direction",
        _ => "squares",
    };
    let shape = Shape { blocks: table.count, threads: SUMS as u32 };
    // SAFETY: the kernels' own parameters; the caller's promise.
    unsafe { queue.launch(kernel, shape, arguments![table.address, table.count, sums]) }
}

/// Number of f64 values that [`measure`] has room for beside each chunk.
pub(crate) const SUMS_MAX: usize = 2 * SUMS;

/// Adds two nodes of the reduction tree, rounded to a type. The sum may lie where one of them lies.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn sum<Q: Queue>(
    queue: &Q,
    wire: WireType,
    [left, right]: [Address; 2],
    to: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let kernel = match wire {
        WireType::F32 => "sum",
        WireType::Bf16 => "sum_bf16",
        WireType::F16 => "sum_f16",
    };
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch(kernel, shape, arguments![left, right, to, length]) }
}

/// A conversion of values to or from a 16-bit type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cast {
    /// Rounds f32 to the nearest values of the type, as f32. They may lie where the source lies.
    Round,
    /// Converts f32 to the type.
    Encode,
    /// Converts the type to f32.
    Decode,
}

/// Converts values.
///
/// # Errors
/// The queue did not take it.
///
/// # Panics
/// If the type is f32, which is not converted.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn cast<Q: Queue>(
    queue: &Q,
    cast: Cast,
    wire: WireType,
    from: Address,
    to: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let kernel = match (cast, wire) {
        (_, WireType::F32) => panic!("f32 is not converted"),
        (Cast::Round, WireType::Bf16) => "round_bf16",
        (Cast::Round, WireType::F16) => "round_f16",
        (Cast::Encode, WireType::Bf16) => "encode_bf16",
        (Cast::Encode, WireType::F16) => "encode_f16",
        (Cast::Decode, WireType::Bf16) => "decode_bf16",
        (Cast::Decode, WireType::F16) => "decode_f16",
    };
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch(kernel, shape, arguments![from, to, length]) }
}

/// Writes the mean of the `count` values that were summed.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn mean<Q: Queue>(
    queue: &Q,
    sum: Address,
    count: f32,
    next: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("mean", shape, arguments![sum, count, next, length]) }
}

/// Writes the larger of two i64 counters each. They may lie where one of the two lies.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn largest<Q: Queue>(
    queue: &Q,
    [left, right]: [Address; 2],
    to: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("largest", shape, arguments![left, right, to, length]) }
}

/// Gives every f32 one value.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn fill<Q: Queue>(queue: &Q, value: f32, to: Address, length: u64) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("fill", shape, arguments![value.to_bits(), to, length]) }
}

/// Sizes of a dense layer's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) records: u64,
    pub(crate) inputs: u64,
    pub(crate) outputs: u64,
}

/// Writes `y = x wᵗ + b`.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`]. The matrices have these sizes.
pub(crate) unsafe fn forward<Q: Queue>(
    queue: &Q,
    [x, w, b]: [Address; 3],
    y: Address,
    Sizes { records, inputs, outputs }: Sizes,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(records * outputs) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("dense_forward", shape, arguments![x, w, b, y, records, inputs, outputs]) }
}

/// Writes `dw = dyᵗ x` and `db`, the sum of dy over the records.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`]. The matrices have these sizes.
pub(crate) unsafe fn weight_gradient<Q: Queue>(
    queue: &Q,
    [dy, x]: [Address; 2],
    [dw, db]: [Address; 2],
    Sizes { records, inputs, outputs }: Sizes,
) -> Result<(), Q::Error> {
    if let Some(shape) = Shape::of(outputs * inputs) {
        let arguments = arguments![dy, x, dw, records, inputs, outputs];
        // SAFETY: the kernel's own parameters; the caller's promise.
        unsafe { queue.launch("dense_weight_gradient", shape, arguments) }?;
    }
    let Some(shape) = Shape::of(outputs) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("dense_bias_gradient", shape, arguments![dy, db, records, outputs]) }
}

/// Writes `dx = dy w`.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`]. The matrices have these sizes.
pub(crate) unsafe fn input_gradient<Q: Queue>(
    queue: &Q,
    [dy, w]: [Address; 2],
    dx: Address,
    Sizes { records, inputs, outputs }: Sizes,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(records * inputs) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("dense_input_gradient", shape, arguments![dy, w, dx, records, inputs, outputs]) }
}

/// A function whose slope a gradient is multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slope {
    Relu,
    Tanh,
}

/// Makes negative f32 values 0.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn relu<Q: Queue>(queue: &Q, values: Address, length: u64) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("relu", shape, arguments![values, length]) }
}

/// Multiplies a gradient by the slope of a function at its answers.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn slope<Q: Queue>(
    queue: &Q,
    slope: Slope,
    gradient: Address,
    answers: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let kernel = match slope {
        Slope::Relu => "relu_slope",
        Slope::Tanh => "tanh_slope",
    };
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch(kernel, shape, arguments![gradient, answers, length]) }
}

/// Multiplies f32 values by a factor, in place.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn scale<Q: Queue>(
    queue: &Q,
    values: Address,
    factor: f32,
    length: u64,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("scale", shape, arguments![values, factor, length]) }
}

/// Tables of floats, one for each byte: see [`Levels`](crate::Levels).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) address: Address,
    pub(crate) count: u32,
    /// Number of bytes with one table.
    pub(crate) run: u64,
}

/// Writes the float of each byte.
///
/// # Errors
/// The queue did not take it.
///
/// # Safety
/// See [`Queue::launch`].
pub(crate) unsafe fn look_up<Q: Queue>(
    queue: &Q,
    bytes: Address,
    Tables { address, count, run }: Tables,
    to: Address,
    length: u64,
) -> Result<(), Q::Error> {
    let Some(shape) = Shape::of(length) else { return Ok(()) };
    // SAFETY: the kernel's own parameters; the caller's promise.
    unsafe { queue.launch("look_up", shape, arguments![bytes, address, count, run, to, length]) }
}
