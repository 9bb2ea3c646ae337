//! Page-locked memory through which payloads go to a device.
//!
//! Always true here: a piece of this memory is written only when the copy from it, if there was
//! one, has ended. Each copy has an event, and kernels that need the values wait for it on the
//! device. So the host waits only when all pieces are in use.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaEvent;

/// Bytes of a piece: one chunk.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// Pieces at most, unless more threads than that copy at once. While one is filled, the device
/// reads another; the rest covers for threads that are held up.
const PIECES_MAX: usize = 4;

/// The pieces that no thread is filling, those whose copies began first in front.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pieces: Mutex<Pieces>,
}

#[derive(Debug, Default)]
struct Pieces {
    idle: VecDeque<Piece>,
    allocated: usize,
}

/// Page-locked memory of [`PIECE_BYTES`].
#[derive(Debug)]
pub(super) struct Piece {
    memory: NonNull<u8>,
    /// The end of the last copy from it.
    pub(super) copied: Option<CudaEvent>,
}

// SAFETY: the memory is this value's alone, and any thread may use it.
unsafe impl Send for Piece {}

impl Piece {
    /// Returns the memory, of which no copy is under way.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: there are so many bytes, zeros at first.
        unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), PIECE_BYTES) }
    }
}

impl Staging {
    /// Takes a piece: one whose copy may still be under way, or one that `allocate` makes. If there
    /// is no memory for another piece, those that are there have to do.
    ///
    /// # Errors
    /// Those of `allocate`, and threads use all pieces.
    pub(super) fn take<E>(&self, allocate: impl FnOnce() -> Result<NonNull<u8>, E>) -> Result<Piece, E> {
        let mut pieces = self.pieces();
        let is_full = pieces.allocated >= PIECES_MAX;
        let idle = pieces.idle.pop_front_if(|piece| is_full || piece.copied.is_none());
        if let Some(idle) = idle {
            return Ok(idle);
        }
        pieces.allocated += 1;
        drop(pieces);
        let memory = match allocate() {
            Ok(memory) => memory,
            Err(error) => {
                let mut pieces = self.pieces();
                pieces.allocated -= 1;
                return pieces.idle.pop_front().ok_or(error);
            }
        };
        // SAFETY: the memory is new, and has so many bytes.
        unsafe { memory.write_bytes(0, PIECE_BYTES) };
        Ok(Piece { memory, copied: None })
    }

    /// Takes a piece back.
    pub(super) fn give_back(&self, piece: Piece) {
        self.pieces().idle.push_back(piece);
    }

    /// Returns all memory, which the caller frees. No copy is under way.
    pub(super) fn take_all(&mut self) -> Vec<NonNull<u8>> {
        let pieces = self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
        pieces.idle.drain(..).map(|piece| piece.memory).collect()
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
