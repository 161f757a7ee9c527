//! The shared secret of a coordinator: random, in a file that only its owner can read.

use crate::limits::TOKEN_BYTES_MAX;
use crate::private;
use rustix::fs::OFlags;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A secret. Its debug output does not reveal it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Creates a token from text, without surrounding whitespace.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Token(text.trim().to_owned())
    }

    /// Returns the text, for the header of a request.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Compares in time that does not depend on where the tokens differ.
    #[must_use]
    pub fn matches(&self, other: &str) -> bool {
        let (a, b) = (self.0.as_bytes(), other.as_bytes());
        a.len() == b.len() && a.iter().zip(b).fold(0, |d, (x, y)| d | (x ^ y)) == 0 && !a.is_empty()
    }

    /// Reads the token in `path`, or creates a random one if the file does not exist.
    ///
    /// # Errors
    /// If the file cannot be read or written, or is readable by others.
    pub fn at(path: &Path) -> io::Result<Self> {
        match private::open(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL) {
            Ok(mut file) => {
                let mut bytes = [0u8; 24];
                rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
                let text: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
                let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
                if written.is_err() {
                    // Later attempts would take it for the token.
                    let _ = std::fs::remove_file(path);
                }
                written.map(|()| Token(text))
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Token::read(path),
            Err(e) => Err(e),
        }
    }

    /// Reads the token in `path`.
    ///
    /// # Errors
    /// If the file cannot be read, is empty, or is readable by others.
    pub fn read(path: &Path) -> io::Result<Self> {
        let mode = private::open_given(path)?.metadata()?.mode();
        if mode & 0o077 != 0 {
            let text = format!("{} can be read by others; run: chmod 600 {}", path.display(), path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        for _ in 0..50 {
            let mut text = String::new();
            private::open_given(path)?.take(TOKEN_BYTES_MAX).read_to_string(&mut text)?;
            let token = Token::from_text(&text);
            if !token.0.is_empty() {
                return Ok(token);
            }
            // The file has been created, but not written yet.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} is empty; remove it and try again", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_is_made_once_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let (a, b) = (Token::at(&path).unwrap(), Token::at(&path).unwrap());
        assert_eq!(a, b);
        assert!(a.matches(b.reveal()) && !a.matches("x") && !Token::from_text("").matches(""));
        assert!(!format!("{a:?}").contains(a.reveal()));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Token::read(&path).unwrap_err().to_string().contains("chmod 600"));
    }
}
