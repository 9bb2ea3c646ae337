//! How changes become etcd's puts and deletes, within its limits, and back. Pure.
//!
//! etcd takes 1.5 MiB and 128 operations a transaction, and no key that one of its operations puts
//! and another removes. A value is cut into pieces, and a batch into transactions:
//!
//! ```text
//!   KEY          number of further pieces (4 bytes, little-endian), then the first piece
//!   KEY \0 0001  the second piece, and so on
//! ```
//!
//! What a longer, older value has left behind its last piece is not read. Removing a key removes
//! all of its pieces.

use std::collections::BTreeMap;

use super::pb::request_op::Request;
use super::pb::{DeleteRangeRequest, PutRequest, RequestOp};
use crate::journal::Batch;

/// Bytes of a value in one key.
const PIECE_BYTES: usize = 512 << 10;

/// Bytes of all keys and values of one transaction; etcd takes 1.5 MiB with everything around them.
const TRANSACTION_BYTES: usize = 1 << 20;

/// Operations of one transaction; etcd takes 128.
const TRANSACTION_OPERATIONS: usize = 100;

/// What is not there.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` has {found} of {expected} pieces in etcd; it was not written by this program alone")]
pub(crate) struct Missing {
    key: String,
    expected: u32,
    found: u32,
}

/// Returns the operations of a batch, under `prefix`, in its order.
pub(super) fn operations(prefix: &str, batch: &Batch) -> Vec<RequestOp> {
    let whole = |key: &str| format!("{prefix}{key}").into_bytes();
    let mut operations: Vec<_> =
        batch.ranges.iter().map(|(begin, end)| delete(whole(begin), whole(end))).collect();
    for (key, value) in &batch.keys {
        let key = format!("{prefix}{key}");
        let Some(value) = value else {
            operations.push(delete(key.clone().into_bytes(), format!("{key}\u{1}").into_bytes()));
            continue;
        };
        let (first, rest) = value.split_at(value.len().min(PIECE_BYTES));
        let rest: Vec<_> = rest.chunks(PIECE_BYTES).collect();
        let mut head = u32::try_from(rest.len()).expect("below 2 TiB").to_le_bytes().to_vec();
        head.extend(first);
        operations.push(put(key.clone().into_bytes(), head));
        let further = |(index, piece): (usize, &&[u8])| put(piece_key(&key, index + 1), piece.to_vec());
        operations.extend(rest.iter().enumerate().map(further));
    }
    operations
}

/// Groups operations, in their order, into transactions within the limits of etcd.
pub(super) fn transactions(operations: Vec<RequestOp>) -> Vec<Vec<RequestOp>> {
    let mut transactions: Vec<Vec<RequestOp>> = Vec::new();
    let mut bytes = 0;
    for operation in operations {
        let more = size(&operation);
        match transactions.last_mut() {
            Some(last)
                if last.len() < TRANSACTION_OPERATIONS
                    && bytes + more <= TRANSACTION_BYTES
                    && !clashes(last, &operation) =>
            {
                bytes += more;
                last.push(operation);
            }
            _ => {
                bytes = more;
                transactions.push(vec![operation]);
            }
        }
    }
    transactions
}

/// Returns whether an operation puts what one of `others` removes: etcd refuses both in one
/// transaction.
fn clashes(others: &[RequestOp], operation: &RequestOp) -> bool {
    let Some(Request::RequestPut(PutRequest { key, .. })) = &operation.request else { return false };
    others.iter().any(|other| match &other.request {
        Some(Request::RequestDeleteRange(range)) => (&range.key..&range.range_end).contains(&key),
        _ => false,
    })
}

/// Returns whether a key has the first piece of a value.
pub(super) fn is_head(key: &str) -> bool {
    !key.contains('\0')
}

/// Returns the values whose pieces are among `found`: keys without their prefix.
pub(super) fn join(found: &BTreeMap<String, Vec<u8>>) -> Result<BTreeMap<String, Vec<u8>>, Missing> {
    let mut values = BTreeMap::new();
    for (key, head) in found.iter().filter(|(key, _)| is_head(key)) {
        let (count, first) = head.split_first_chunk::<4>().ok_or_else(|| missing(key, 1, 0))?;
        let count = u32::from_le_bytes(*count);
        let mut value = first.to_vec();
        for index in 1..=count {
            let name = String::from_utf8_lossy(&piece_key(key, index as usize)).into_owned();
            value.extend(found.get(&name).ok_or_else(|| missing(key, count + 1, index))?);
        }
        values.insert(key.clone(), value);
    }
    Ok(values)
}

pub(super) fn put(key: Vec<u8>, value: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Request::RequestPut(PutRequest { key, value, lease: 0 })) }
}

/// Removes the keys from `key` to `end`, without `end`.
pub(super) fn delete(key: Vec<u8>, end: Vec<u8>) -> RequestOp {
    let range = DeleteRangeRequest { key, range_end: end };
    RequestOp { request: Some(Request::RequestDeleteRange(range)) }
}

fn size(operation: &RequestOp) -> usize {
    match &operation.request {
        Some(Request::RequestPut(put)) => put.key.len() + put.value.len(),
        Some(Request::RequestDeleteRange(range)) => range.key.len() + range.range_end.len(),
        Some(Request::RequestRange(_)) | None => 0,
    }
}

fn piece_key(key: &str, index: usize) -> Vec<u8> {
    format!("{key}\0{index:04}").into_bytes()
}

fn missing(key: &str, expected: u32, found: u32) -> Missing {
    Missing { key: key.to_owned(), expected, found }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::journal::any::batch;

    /// Applies the operations to `store` as etcd would, with keys without `prefix`.
    fn apply(
        store: &mut BTreeMap<String, Vec<u8>>,
        prefix: &str,
        transactions: impl IntoIterator<Item = Vec<RequestOp>>,
    ) {
        let name =
            |key: &[u8]| String::from_utf8(key.to_vec()).unwrap().strip_prefix(prefix).unwrap().to_owned();
        for operation in transactions.into_iter().flatten() {
            match operation.request.unwrap() {
                Request::RequestPut(put) => drop(store.insert(name(&put.key), put.value)),
                Request::RequestDeleteRange(range) => {
                    let range = name(&range.key)..name(&range.range_end);
                    store.retain(|key, _| !range.contains(key));
                }
                Request::RequestRange(_) => panic!("reads nothing"),
            }
        }
    }

    fn batches() -> impl Strategy<Value = Vec<Batch>> {
        // Lengths around the edges of one, two and three pieces.
        let length = prop_oneof![
            3 => 0usize..50,
            1 => (1usize..4, 0usize..3).prop_map(|(pieces, more)| pieces * PIECE_BYTES + more - 1),
        ];
        let value = (length, any::<u8>()).prop_map(|(length, byte)| vec![byte; length]);
        proptest::collection::vec(batch(value), 0..5)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_cut_comes_out_whole(batches in batches()) {
            let (mut expected, mut store) = (BTreeMap::new(), BTreeMap::new());
            for batch in batches {
                let cut = transactions(operations("p/", &batch));
                for transaction in &cut {
                    prop_assert!(transaction.iter().all(|operation| !clashes(transaction, operation)));
                }
                apply(&mut store, "p/", cut);
                batch.apply(&mut expected);
                prop_assert!(join(&store) == Ok(expected.clone()));
            }
        }

        #[test]
        fn transactions_keep_the_order_and_the_limits(
            sizes in proptest::collection::vec(0usize..PIECE_BYTES + 5, 0..30),
            small in 0usize..300,
        ) {
            let sizes = sizes.into_iter().chain(std::iter::repeat_n(1, small));
            let all: Vec<_> = sizes.map(|size| put(b"key".to_vec(), vec![0; size])).collect();
            let cut = transactions(all.clone());
            for transaction in &cut {
                prop_assert!((1..=TRANSACTION_OPERATIONS).contains(&transaction.len()));
                prop_assert!(transaction.iter().map(size).sum::<usize>() <= TRANSACTION_BYTES);
            }
            prop_assert!(cut.concat() == all);
        }
    }

    #[test]
    fn a_value_that_lost_a_piece_is_an_error_that_names_it() {
        let batch = Batch::from([("job/1".to_owned(), Some(vec![7; 2 * PIECE_BYTES + 1]))]);
        let mut store = BTreeMap::new();
        apply(&mut store, "", [operations("", &batch)]);
        assert_eq!(store.len(), 3);
        store.remove("job/1\u{0}0002");
        assert_eq!(join(&store), Err(missing("job/1", 3, 2)));
        assert_eq!(join(&BTreeMap::from([("k".to_owned(), vec![1])])), Err(missing("k", 1, 0)));
    }
}
