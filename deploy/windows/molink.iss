; A setup program for Windows, by Inno Setup 6: it brings the installer of a release, which fetches and
; checks the rest. From a folder that tools/release.py made:
;
;   ISCC /DVersion=0.1.0 /DRelease=FOLDER deploy\windows\molink.iss

#ifndef Version
  #error Name the version: /DVersion=0.1.0
#endif
#ifndef Release
  #error Name the folder of the release: /DRelease=FOLDER
#endif

[Setup]
AppId={{6F2C3C52-6E0B-4B7B-8C0E-5A3A7D1B9E64}
AppName=molink
AppVersion={#Version}
; Where install.ps1 puts molink.
DefaultDirName={localappdata}\Programs\molink
DisableDirPage=yes
DisableProgramGroupPage=yes
PrivilegesRequired=lowest
ArchitecturesAllowed=x64compatible
ArchitecturesInstallIn64BitMode=x64compatible
LicenseFile=..\..\LICENSE
OutputBaseFilename=molink-{#Version}-setup
SolidCompression=yes
; PATH is changed.
ChangesEnvironment=yes

[Files]
Source: "{#Release}\install.ps1"; DestDir: "{app}\setup"

[Run]
Filename: "powershell.exe"; Parameters: "-NoProfile -ExecutionPolicy Bypass -File ""{app}\setup\install.ps1"""; StatusMsg: "Installing molink and torch, which is a large download ..."; Flags: waituntilterminated

[UninstallRun]
; State, keys and models stay; `molink uninstall` deletes them, too.
Filename: "{app}\.venv\Scripts\python.exe"; Parameters: "-m molinkd uninstall --yes --keep-state"; Flags: runhidden; RunOnceId: "molink"
