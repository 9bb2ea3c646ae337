//! Ragged columns whose records have equal lengths: `data.lengths` gives them a fixed shape.
//!
//! A file alone cannot say whether a list has the same length in all other files. So a format reads
//! lists and bytes as ragged columns, and the job says which of them have one length.

use std::collections::BTreeMap;

use crate::column::Column;
use crate::cuts::Cuts;
use crate::error::{Result, wrong};
use crate::format::{Outline, Source};
use crate::object::{Content, Object};
use crate::observer::Observer;
use crate::pass::Distinct;

/// Gives columns of `source` these lengths.
///
/// # Errors
/// There is no such column, it has a fixed shape, or its records would be larger than memory.
pub(crate) fn fix(
    source: Box<dyn Source>,
    object: &Object,
    lengths: &BTreeMap<String, usize>,
) -> Result<Box<dyn Source>> {
    if lengths.is_empty() {
        return Ok(source);
    }
    let mut outline = source.outline().clone();
    let mut fixed = vec![None; outline.columns.len()];
    for (name, &length) in lengths {
        let refuse =
            |reason: String| wrong(object.path(), format!("data.lengths.{name} = {length}: {reason}"));
        let Some(at) = outline.columns.iter().position(|spec| spec.name == *name) else {
            let ragged = outline.columns.iter().filter(|spec| spec.ragged);
            let ragged: Vec<_> = ragged.take(20).map(|spec| spec.name.as_str()).collect();
            return refuse(format!("no such column; ragged ones are {}", ragged.join(", ")));
        };
        let spec = &mut outline.columns[at];
        if !spec.ragged {
            return refuse(format!("column {spec} has a fixed shape already; remove the length"));
        }
        *spec = spec.clone().of_length(length);
        if spec.width().is_none() {
            return refuse("a record would be larger than any memory".to_owned());
        }
        fixed[at] = Some(length);
    }
    Ok(Box::new(Fixed { source, fixed, outline }))
}

struct Fixed {
    source: Box<dyn Source>,
    /// Length of each column that is ragged in the file.
    fixed: Vec<Option<usize>>,
    outline: Outline,
}

impl Source for Fixed {
    fn outline(&self) -> &Outline {
        &self.outline
    }

    fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
        let fix = |(&at, column): (&usize, Column)| {
            let Some(length) = self.fixed[at] else { return column };
            column.of_length(length, |record, found| {
                let record = self.outline.blocks[..block].iter().sum::<u64>() + record as u64;
                let name = &self.outline.columns[at].name;
                format!(
                    "column `{name}`: record {record} of the file has {found} elements, data.lengths.{name} is {length}; \
                     mend it, or set its length"
                )
            })
        };
        Ok(columns.iter().zip(self.source.read(block, columns)?).map(fix).collect())
    }

    fn is_in_place(&self) -> bool {
        self.source.is_in_place()
    }

    fn name(&self, record: u64) -> Option<String> {
        self.source.name(record)
    }

    fn cuts(&self) -> Option<&Cuts> {
        self.source.cuts()
    }

    fn bytes(&self, object: &Object) -> u64 {
        self.source.bytes(object)
    }

    fn content(&self, object: &Object, content: Content, observer: &dyn Observer) -> Result<Content> {
        self.source.content(object, content, observer)
    }

    fn distinct(&self, column: usize) -> Option<&Distinct> {
        self.source.distinct(column)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proto::column::{ColumnSpec, ElementType};

    use super::*;
    use crate::column::Fault;

    /// A file of one column with two blocks: lists of 2, 2, and of 2, `last` numbers. Without a
    /// `last`, that record has no value.
    struct Lists {
        outline: Outline,
        last: Option<usize>,
    }

    impl Source for Lists {
        fn outline(&self) -> &Outline {
            &self.outline
        }

        fn read(&self, block: usize, columns: &[usize]) -> Result<Vec<Column>> {
            let mut column = Column::with_capacity(self.outline.columns[0].clone(), 2);
            column.push(&[1, 2]);
            match self.last {
                Some(last) if block == 1 => column.push(&[3; 9][..last]),
                None if block == 1 => column.push_missing(),
                _ => column.push(&[3; 2]),
            }
            Ok(vec![column; columns.len()])
        }
    }

    fn open(last: Option<usize>, name: &str, length: usize) -> Result<Box<dyn Source>> {
        let columns =
            vec![ColumnSpec::ragged("x", ElementType::U8, []), ColumnSpec::fixed("y", ElementType::U8, [])];
        let lists = Lists { outline: Outline { columns, blocks: vec![2, 2] }, last };
        let lengths = BTreeMap::from([(name.to_owned(), length)]);
        fix(Box::new(lists), &Object::copy(Path::new("a"), Vec::new()), &lengths)
    }

    #[test]
    fn lists_of_one_length_are_a_column_of_fixed_shape() {
        let source = open(Some(2), "x", 2).unwrap();
        assert_eq!(source.outline().columns[0], ColumnSpec::fixed("x", ElementType::U8, [2]));
        let column = source.read(1, &[0]).unwrap().remove(0);
        assert_eq!((column.spec().ragged, column.record(1)), (false, &[3, 3][..]));
        assert_eq!(
            open(Some(2), "x", 1).unwrap().outline().columns[0],
            ColumnSpec::fixed("x", ElementType::U8, [])
        );
    }

    #[test]
    fn a_record_of_another_length_is_broken_and_has_its_number() {
        for last in [0, 1, 3] {
            let column = open(Some(last), "x", 2).unwrap().read(1, &[0]).unwrap().remove(0);
            assert_eq!((column.fault(0), column.record(0), column.records()), (None, &[1, 2][..], 2));
            let Some(Fault::Broken(reason)) = column.fault(1) else { panic!("{:?}", column.fault(1)) };
            let expected =
                format!("column `x`: record 3 of the file has {last} elements, data.lengths.x is 2");
            assert!(reason.contains(&expected), "{reason}");
        }
    }

    #[test]
    fn a_record_without_a_value_stays_one() {
        let column = open(None, "x", 2).unwrap().read(1, &[0]).unwrap().remove(0);
        assert_eq!((column.fault(0), column.fault(1)), (None, Some(Fault::Missing)));
        assert_eq!((column.record(0), column.record(1)), (&[1, 2][..], &[0, 0][..]));
    }

    #[test]
    fn a_length_of_no_ragged_column_is_refused() {
        let error = |name, length| open(Some(2), name, length).err().expect("no such length").to_string();
        assert!(error("z", 2).contains("data.lengths.z = 2: no such column; ragged ones are x"));
        assert!(error("y", 2).contains("column `y` u8[] has a fixed shape already"));
        assert!(error("x", usize::MAX).contains("larger than any memory"));
    }
}
