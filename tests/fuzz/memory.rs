//! Memory that a thread takes from Rust's allocator.
#![expect(unsafe_code, reason = "only an allocator sees how much memory is taken")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;

thread_local! {
    /// Bytes that the thread holds. Another thread may give them back, so it may be negative.
    static HELD: Cell<isize> = const { Cell::new(0) };
    /// Most bytes that it held since the last call of [`most`].
    static MOST: Cell<isize> = const { Cell::new(0) };
    /// What the thread does, for the message of an allocation that fails and ends the process.
    static DOING: Cell<(&'static str, u64, u64)> = const { Cell::new(("", 0, 0)) };
}

/// The system's allocator, with a count for each thread.
struct Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

// SAFETY: each call is forwarded unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        taken(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        taken(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let moved = taken(unsafe { System.realloc(at, layout, size) }, size);
        if !moved.is_null() {
            count(-(layout.size() as isize));
        }
        moved
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
        count(-(layout.size() as isize));
    }
}

fn taken(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        let (target, seed, iteration) = DOING.try_with(Cell::get).unwrap_or_default();
        // Neither takes memory. The caller may end the process.
        let _ = writeln!(
            std::io::stderr(),
            "no memory of {bytes} bytes: target {target}, seed {seed}, iteration {iteration}"
        );
    } else {
        count(bytes as isize);
    }
    memory
}

fn count(bytes: isize) {
    // A thread that ends has no counts any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

/// Calls `work`, and returns the most bytes that the thread held meanwhile, beyond what it held
/// before. The rest names the work if memory runs out.
pub(crate) fn most(target: &'static str, seed: u64, iteration: u64, work: impl FnOnce()) -> usize {
    DOING.set((target, seed, iteration));
    let before = HELD.get();
    MOST.set(before);
    work();
    (MOST.get() - before).max(0) as usize
}

#[test]
fn memory_is_counted_with_what_is_given_back() {
    let large = most("", 0, 0, || drop(std::hint::black_box(vec![1u8; 1 << 20])));
    assert!((1 << 20..1 << 21).contains(&large), "{large}");
    let twice = most("", 0, 0, || {
        drop(std::hint::black_box(vec![1u8; 1 << 20]));
        drop(std::hint::black_box(vec![0u8; 1 << 20]));
    });
    assert!(twice < 1 << 21, "{twice}");
}
