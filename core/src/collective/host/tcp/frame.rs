//! The frames that ranks send each other: a kind, a label and bytes.

use std::{
    io::{Error, ErrorKind, IoSlice, Read, Result, Write},
    sync::Arc,
};

/// The maximum length of a label in bytes. The label of an abort is truncated to it.
const LABEL_BYTES: usize = 4096;

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A rank's part in a collective.
    Exchange = 0,
    /// What one rank sends another.
    Message = 1,
    /// The end of the group; the label is the reason.
    Abort = 2,
    /// A keep-alive frame.
    Alive = 3,
}

#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) label: String,
    pub(super) bytes: Arc<[u8]>,
}

pub(super) fn write(out: &mut impl Write, kind: Kind, label: &str, bytes: &[u8]) -> Result<()> {
    let label = &label[..label.floor_char_boundary(LABEL_BYTES)];
    let mut head = Vec::with_capacity(13 + label.len());
    head.push(kind as u8);
    head.extend_from_slice(&(label.len() as u32).to_le_bytes());
    head.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    head.extend_from_slice(label.as_bytes());
    // In one write, so that a small frame is one packet.
    let mut sent = out.write_vectored(&[IoSlice::new(&head), IoSlice::new(bytes)])?;
    if sent < head.len() {
        out.write_all(&head[sent..])?;
        sent = head.len();
    }
    out.write_all(&bytes[sent - head.len()..])
}

/// # Errors
/// [`ErrorKind::UnexpectedEof`] if the connection has ended, [`ErrorKind::InvalidData`] if the bytes are not a frame.
pub(super) fn read(incoming: &mut impl Read) -> Result<(Kind, Frame)> {
    let mut head = [0; 13];
    incoming.read_exact(&mut head)?;
    let [kind, a, b, c, d, length @ ..] = head;
    let kind = match kind {
        0 => Kind::Exchange,
        1 => Kind::Message,
        2 => Kind::Abort,
        3 => Kind::Alive,
        _ => return Err(Error::new(ErrorKind::InvalidData, "it sent something that is no frame")),
    };
    let label = u32::from_le_bytes([a, b, c, d]) as usize;
    if label > LABEL_BYTES {
        return Err(Error::new(ErrorKind::InvalidData, "it sent a label that is too long"));
    }
    let label = read_bytes(incoming, label as u64)?;
    let label = String::from_utf8(label)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "it sent a label that is not text"))?;
    let bytes = read_bytes(incoming, u64::from_le_bytes(length))?;
    Ok((kind, Frame { label, bytes: bytes.into() }))
}

/// Reads `length` bytes. Memory is allocated as they arrive, so that a wrong length allocates none.
fn read_bytes(incoming: &mut impl Read, length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length.min(1 << 20) as usize);
    incoming.take(length).read_to_end(&mut bytes)?;
    if (bytes.len() as u64) < length {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let mut wire = Vec::new();
        write(&mut wire, Kind::Exchange, "barrier", &[]).unwrap();
        write(&mut wire, Kind::Message, "send", &[7; 5000]).unwrap();
        write(&mut wire, Kind::Abort, &"ä".repeat(LABEL_BYTES), &[]).unwrap();
        let mut wire = &wire[..];
        let (kind, frame) = read(&mut wire).unwrap();
        assert_eq!((kind, &*frame.label, frame.bytes.len()), (Kind::Exchange, "barrier", 0));
        let (kind, frame) = read(&mut wire).unwrap();
        assert_eq!((kind, &*frame.label, &*frame.bytes), (Kind::Message, "send", &[7; 5000][..]));
        assert_eq!(read(&mut wire).unwrap().1.label, "ä".repeat(LABEL_BYTES / 2));
        assert_eq!(read(&mut wire).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn bytes_that_are_no_frame_are_refused() {
        let mut wire = Vec::new();
        write(&mut wire, Kind::Message, "send", &[1; 100]).unwrap();
        assert_eq!(read(&mut &wire[..wire.len() - 1]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        for (place, byte) in [(0, 4), (3, 1), (13, 0xFF)] {
            let mut wrong = wire.clone();
            wrong[place] = byte;
            assert_eq!(read(&mut &wrong[..]).unwrap_err().kind(), ErrorKind::InvalidData);
        }
        // A length beyond what comes takes no memory for it.
        wire[12] = 0x7F;
        assert_eq!(read(&mut &wire[..]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
